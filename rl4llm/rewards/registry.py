"""The table of rewards that a configuration may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl4llm.core.registry import Registry

if TYPE_CHECKING:
    from rl4llm.core.base_env import BaseRewardFunction

REWARDS: Registry[type[BaseRewardFunction] | Callable[..., Any]] = Registry(
    "rewards.name",
    group="rl4llm.rewards",
    table={
        "clip": "rl4llm.rewards.wrappers:Clip",
        "code": "rl4llm.extensions.sandbox.code_reward:CodeReward",
        "compute_score": "rl4llm.extensions.migration.rewards:ComputeScore",
        "env_steps": "rl4llm.extensions.adapters.step_rewards:StepRewards",
        "format": "rl4llm.rewards.format:FormatReward",
        "gate": "rl4llm.rewards.wrappers:Gate",
        "length": "rl4llm.rewards.length:LengthReward",
        "llm_judge": "rl4llm.extensions.judges.llm_judge:LLMJudge",
        "math": "rl4llm.rewards.math:MathReward",
        "overlong": "rl4llm.rewards.overlong:OverlongPenalty",
        "reasoning_gym": "rl4llm.extensions.adapters.reasoning_reward:ReasoningReward",
        "repetition": "rl4llm.rewards.repetition:RepetitionPenalty",
        "reward_model": "rl4llm.extensions.judges.reward_model:LearnedReward",
        "scale": "rl4llm.rewards.wrappers:Scale",
        "threshold": "rl4llm.rewards.wrappers:Threshold",
        "tool_use": "rl4llm.rewards.tool_use:ToolUseReward",
        "verifiers": "rl4llm.extensions.adapters.verifiers:VerifiersReward",
        "winner": "rl4llm.extensions.judges.judges:Winner",
    },
)
"""Subclasses of BaseRewardFunction, and plain functions ``f(completions, **columns) -> list[float]``."""

register_reward = REWARDS.register
"""``@register_reward("name")`` on a class or function makes it available to configurations under that name, plain
``@register_reward`` under the name of the class or function."""
