"""Stand in for the module `rl4llm.logging`: every run logs to `output.dir`."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
