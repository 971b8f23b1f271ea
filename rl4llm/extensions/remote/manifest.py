"""Environments on other machines: the command of a host, and the trainer's side."""

PROVIDES = {
    "rl4llm.servers": {"env": "rl4llm.extensions.remote.command:run"},
    "rl4llm.parts": {"hosted_environment": "rl4llm.extensions.remote.env:HostedEnvironment"},
}
