"""Datasets, prompts and batches."""

from rl4llm.core.registry import lazy

__getattr__, __all__ = lazy(__name__, __file__)
