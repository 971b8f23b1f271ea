"""Modules of environments that michaelnny/rl4llm has."""
