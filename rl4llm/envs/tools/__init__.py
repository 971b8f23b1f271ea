"""Tools that a policy may call: typed Python functions with a docstring, and sets of them that share state."""

from rl4llm.core.registry import lazy
from rl4llm.envs.tools.tool import tool as tool  # else the name is that of the module

__getattr__, __all__ = lazy(__name__, __file__)
