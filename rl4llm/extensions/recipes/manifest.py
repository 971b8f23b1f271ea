"""The command that repeats runs."""

PROVIDES = {
    "rl4llm.recipes": {
        "list": "rl4llm.extensions.recipes.list_command",
        "run": "rl4llm.extensions.recipes.command",
    }
}
