"""Modules of the core that michaelnny/rl4llm has."""
