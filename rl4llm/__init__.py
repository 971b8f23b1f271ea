"""rl4llm: reinforcement learning for language models in multi-turn environments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl4llm.algorithms import register_algorithm
    from rl4llm.api import DAPOTrainer, GRPOTrainer
    from rl4llm.config import load_config
    from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState, SampleState
    from rl4llm.core.types import SamplingParams
    from rl4llm.envs import register_env
    from rl4llm.rewards import register_reward

__version__ = "0.1.0"

_HOMES = {
    "rl4llm.algorithms": ("register_algorithm",),
    "rl4llm.api": ("DAPOTrainer", "GRPOTrainer"),
    "rl4llm.config": ("load_config",),
    "rl4llm.core.base_env": ("BaseMDPEnv", "BaseRewardFunction", "ChatMessage", "EnvState", "SampleState"),
    "rl4llm.core.types": ("SamplingParams",),
    "rl4llm.envs": ("register_env",),
    "rl4llm.rewards": ("register_reward",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import rl4llm`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rl4llm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
