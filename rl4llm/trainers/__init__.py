"""Trainers: the loop of reinforcement learning, and that of learning from a dataset."""

__path__.append(
    f"{__path__[0]}/../extensions/migration/former/trainers"
)  # modules that michaelnny/rl4llm has
