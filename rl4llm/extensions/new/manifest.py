"""The command that writes the files of a task."""

PROVIDES = {"rl4llm.commands": {"new": "rl4llm.extensions.new.command"}}
