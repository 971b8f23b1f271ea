"""A server for clients of the Tinker SDK."""

PROVIDES = {"rl4llm.servers": {"tinker": "rl4llm.extensions.tinker.command:run"}}
