"""Tools that a policy may call: typed Python functions with a docstring."""

from collections.abc import Callable
from typing import Any

from rl4llm.core.registry import Registry
from rl4llm.envs.tools.calculator import calculator

TOOLS: Registry[Callable[..., Any]] = Registry("env.tools")
register_tool = TOOLS.register
register_tool("calculator")(calculator)

__all__ = ["TOOLS", "calculator", "register_tool"]
