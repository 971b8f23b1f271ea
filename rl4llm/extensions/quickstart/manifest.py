"""The first run, its task and its pretrained model."""

PROVIDES = {
    "rl4llm.recipes": {"quickstart": "rl4llm.extensions.quickstart.command"},
    "rl4llm.tasks": {"arithmetic": "rl4llm.extensions.quickstart.arithmetic:arithmetic_rows"},
    "rl4llm.parts": {"pretrained_model": "rl4llm.extensions.quickstart.pretrained:smollm2"},
}
