"""rl4llm: reinforcement learning for language models in multi-turn environments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl4llm.algorithms import register_algorithm
    from rl4llm.api import DAPOTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, PPOTrainer, RewardTrainer, SFTTrainer
    from rl4llm.config import load_config
    from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState, SampleState
    from rl4llm.core.base_opponent import BaseOpponent, register_opponent
    from rl4llm.core.base_trainer import BaseRLTrainer, BaseTrainer
    from rl4llm.core.types import SamplingParams
    from rl4llm.envs import CodeEnv, DebateEnv, RolesEnv, ToolMDPEnv, register_env
    from rl4llm.envs.tools import ToolSet, register_tool, tool
    from rl4llm.rewards import BaseJudge, register_reward
    from rl4llm.trl.arguments import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig

__version__ = "0.1.0"

__all__ = [
    "BaseJudge",
    "BaseMDPEnv",
    "BaseOpponent",
    "BaseRLTrainer",
    "BaseRewardFunction",
    "BaseTrainer",
    "ChatMessage",
    "CodeEnv",
    "DAPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DebateEnv",
    "EnvState",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "PPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RolesEnv",
    "SFTConfig",
    "SFTTrainer",
    "SampleState",
    "SamplingParams",
    "ToolMDPEnv",
    "ToolSet",
    "load_config",
    "register_algorithm",
    "register_env",
    "register_opponent",
    "register_reward",
    "register_tool",
    "tool",
]

_HOME = {
    "BaseJudge": "rl4llm.rewards",
    "BaseOpponent": "rl4llm.core.base_opponent",
    "BaseRLTrainer": "rl4llm.core.base_trainer",
    "BaseTrainer": "rl4llm.core.base_trainer",
    "CodeEnv": "rl4llm.envs",
    "DAPOTrainer": "rl4llm.api",
    "DPOConfig": "rl4llm.trl.arguments",
    "DPOTrainer": "rl4llm.api",
    "DebateEnv": "rl4llm.envs",
    "GRPOConfig": "rl4llm.trl.arguments",
    "GRPOTrainer": "rl4llm.api",
    "KTOConfig": "rl4llm.trl.arguments",
    "KTOTrainer": "rl4llm.api",
    "PPOTrainer": "rl4llm.api",
    "RewardConfig": "rl4llm.trl.arguments",
    "RewardTrainer": "rl4llm.api",
    "RolesEnv": "rl4llm.envs",
    "SFTConfig": "rl4llm.trl.arguments",
    "SFTTrainer": "rl4llm.api",
    "SamplingParams": "rl4llm.core.types",
    "ToolMDPEnv": "rl4llm.envs",
    "ToolSet": "rl4llm.envs.tools",
    "load_config": "rl4llm.config",
    "register_algorithm": "rl4llm.algorithms",
    "register_env": "rl4llm.envs",
    "register_opponent": "rl4llm.core.base_opponent",
    "register_reward": "rl4llm.rewards",
    "register_tool": "rl4llm.envs.tools",
    "tool": "rl4llm.envs.tools",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import rl4llm`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'rl4llm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "rl4llm.core.base_env")), name)
