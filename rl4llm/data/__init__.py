"""Datasets, prompts and batches."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
