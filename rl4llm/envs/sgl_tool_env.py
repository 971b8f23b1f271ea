"""The seed's import path of the tool environment, which works with every engine."""

from rl4llm.envs.tool import ToolMDPEnv as SglToolMDPEnv

__all__ = ["SglToolMDPEnv"]
