"""The table of rewards that a configuration may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.registry import Registry

REWARDS: Registry[type[BaseRewardFunction] | Callable[..., Any]] = Registry("rewards.name")
"""Subclasses of BaseRewardFunction, and plain functions ``f(completions, **columns) -> list[float]``."""

register_reward = REWARDS.register
"""``@register_reward("name")`` on a class or function makes it available to configurations under that name."""
