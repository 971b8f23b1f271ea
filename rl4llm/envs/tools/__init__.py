"""Tools that a policy may call: typed Python functions with a docstring, and sets of them that share something."""

from rl4llm.envs.tools.calculator import calculator
from rl4llm.envs.tools.mcp import MCP
from rl4llm.envs.tools.python import Python
from rl4llm.envs.tools.search import Search
from rl4llm.envs.tools.tool import TOOLS, Functions, Tool, ToolError, ToolSet, as_toolset, homes, register_tool, tool
from rl4llm.envs.tools.workspace import Workspace

register_tool("calculator")(calculator)

__all__ = [
    "MCP",
    "TOOLS",
    "Functions",
    "Python",
    "Search",
    "Tool",
    "ToolError",
    "ToolSet",
    "Workspace",
    "as_toolset",
    "calculator",
    "homes",
    "register_tool",
    "tool",
]
