"""`rl4llm import`, the reward functions of verl, and answers to keys and names of other projects."""

PROVIDES = {
    "rl4llm.commands": {"import": "rl4llm.extensions.migration.command"},
    "rl4llm.rewards": {"compute_score": "rl4llm.extensions.migration.compute_score:ComputeScore"},
    "rl4llm.parts": {
        "answer_key": "rl4llm.extensions.migration.answers:of_key",
        "answer_name": "rl4llm.extensions.migration.names:of_name",
    },
}
