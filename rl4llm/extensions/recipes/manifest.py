"""The command that repeats runs."""

PROVIDES = {"rl4llm.commands": {"recipe": "rl4llm.extensions.recipes.command"}}
