"""The composition root, the only place that knows every class: from a configuration to a trainer that is ready to run."""

from rl4llm.core.registry import lazy

__getattr__, __all__ = lazy(__name__, __file__)
