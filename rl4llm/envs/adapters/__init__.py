"""Environments of other libraries; each is imported when its environment is made."""

from rl4llm.envs.adapters.gymnasium import GymnasiumEnv
from rl4llm.envs.adapters.openenv import OpenEnv
from rl4llm.envs.adapters.step_rewards import StepRewards
from rl4llm.envs.adapters.verifiers import VerifiersEnv

__all__ = ["GymnasiumEnv", "OpenEnv", "StepRewards", "VerifiersEnv"]
