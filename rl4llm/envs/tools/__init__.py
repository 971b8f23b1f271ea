"""Tools that a policy may call: typed Python functions with a docstring, and sets of them that share state."""

from rl4llm.core.registry import lazy
from rl4llm.core.tables import TOOLS, register_tool
from rl4llm.envs.tools.tool import Functions, Tool, ToolError, ToolSet, as_toolset, homes, tool

_HOMES = {"calculator": "rl4llm.envs.tools.calculate"}
__getattr__ = lazy(__name__, _HOMES)
__all__ = [
    "TOOLS",
    "Functions",
    "Tool",
    "ToolError",
    "ToolSet",
    "as_toolset",
    "homes",
    "register_tool",
    "tool",
    *_HOMES,
]
