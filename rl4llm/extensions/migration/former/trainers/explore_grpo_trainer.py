"""Stand in for the module of this name: `algorithm.name=explore_grpo` takes its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
