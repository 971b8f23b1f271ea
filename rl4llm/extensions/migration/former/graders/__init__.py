"""Stand in for the package `rl4llm.graders`: its graders are rewards here."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
