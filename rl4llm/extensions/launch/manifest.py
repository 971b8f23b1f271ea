"""The command that starts several processes, and the check of what `accelerate launch` asks for."""

PROVIDES = {
    "rl4llm.commands": {"launch": "rl4llm.extensions.launch.command"},
    "rl4llm.parts": {"check_accelerate": "rl4llm.extensions.launch.accelerate:check_accelerate"},
}
