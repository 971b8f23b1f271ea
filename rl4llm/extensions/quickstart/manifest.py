"""The first run and its task."""

PROVIDES = {
    "rl4llm.recipes": {"quickstart": "rl4llm.extensions.quickstart.command"},
    "rl4llm.tasks": {"arithmetic": "rl4llm.extensions.quickstart.arithmetic:arithmetic_rows"},
}
