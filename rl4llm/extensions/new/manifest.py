"""The command that writes the files of a task."""

PROVIDES = {"rl4llm.recipes": {"new": "rl4llm.extensions.new.command"}}
