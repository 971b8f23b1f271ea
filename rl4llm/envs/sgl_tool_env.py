"""The import path under which older code finds the tool environment; it works with every engine."""

from rl4llm.envs.tool import ToolMDPEnv as SglToolMDPEnv

__all__ = ["SglToolMDPEnv"]
