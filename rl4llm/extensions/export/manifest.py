"""The command that writes a run's model."""

PROVIDES = {"rl4llm.commands": {"export": "rl4llm.extensions.export.command"}}
