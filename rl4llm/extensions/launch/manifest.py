"""The command that starts the processes of a run."""

PROVIDES = {"rl4llm.commands": {"launch": "rl4llm.extensions.launch.command"}}
