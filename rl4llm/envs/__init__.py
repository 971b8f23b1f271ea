"""Environments: what the policy talks to."""

from rl4llm.envs.adapters import GymnasiumEnv, OpenEnv, VerifiersEnv
from rl4llm.envs.agent import AgentEnv
from rl4llm.envs.chat import ChatEnv
from rl4llm.envs.code import CodeEnv
from rl4llm.envs.debate import DebateEnv
from rl4llm.envs.reasoning_gym import ReasoningGymEnv
from rl4llm.envs.registry import ENVIRONMENTS, register_env
from rl4llm.envs.roles import RolesEnv
from rl4llm.envs.tool import ToolMDPEnv

__all__ = [
    "ENVIRONMENTS",
    "AgentEnv",
    "ChatEnv",
    "CodeEnv",
    "DebateEnv",
    "GymnasiumEnv",
    "OpenEnv",
    "ReasoningGymEnv",
    "RolesEnv",
    "ToolMDPEnv",
    "VerifiersEnv",
    "register_env",
]
