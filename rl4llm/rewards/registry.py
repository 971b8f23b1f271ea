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
        "format": "rl4llm.rewards.format:FormatReward",
        "gate": "rl4llm.rewards.wrappers:Gate",
        "length": "rl4llm.rewards.length:LengthReward",
        "math": "rl4llm.rewards.math:MathReward",
        "overlong": "rl4llm.rewards.overlong:OverlongPenalty",
        "repetition": "rl4llm.rewards.repetition:RepetitionPenalty",
        "scale": "rl4llm.rewards.wrappers:Scale",
        "threshold": "rl4llm.rewards.wrappers:Threshold",
        "tool_use": "rl4llm.rewards.tool_use:ToolUseReward",
    },
)
"""Subclasses of BaseRewardFunction, and plain functions ``f(completions, **columns) -> list[float]``."""

register_reward = REWARDS.register
"""``@register_reward("name")`` on a class or function makes it available to configurations under that name, plain
``@register_reward`` under the name of the class or function."""
