"""rl4llm: reinforcement learning for language models in multi-turn environments."""

__version__ = "0.1.0"
