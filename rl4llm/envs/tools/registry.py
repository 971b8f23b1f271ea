"""The table of tools that `env.tools` may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl4llm.core.registry import Registry

if TYPE_CHECKING:
    from rl4llm.envs.tools.tool import ToolSet

TOOLS: Registry[Callable[..., Any] | type[ToolSet]] = Registry(
    "env.tools", group="rl4llm.tools", table={"calculator": "rl4llm.envs.tools.calculate:calculator"}
)
register_tool = TOOLS.register
