"""Stand in for the module `rl4llm.utils.model_utils`: `rl4llm.load_model` and others take its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
