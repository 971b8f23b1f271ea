"""The import path under which older code finds the tool environment; it works with every engine."""

from rl4llm.core.registry import lazy
from rl4llm.envs.tool import ToolMDPEnv as SglToolMDPEnv

__getattr__, _ = lazy(__name__, __file__)
__all__ = ["SglToolMDPEnv"]
