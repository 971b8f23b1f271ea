"""Stand in for the module `rl4llm.core.distributed`: trainers and launchers handle several processes here."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
