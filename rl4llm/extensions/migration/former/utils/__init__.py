"""Stand in for the package `rl4llm.utils`: `rl4llm.load_config` and others take its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
