"""Combine several rewards into one: functions that fit `reward_transform_fn`.

Each takes the rewards by name, tensors of shape (num_samples,), and returns one tensor of that shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl4llm.core.errors import RewardError, unknown


def weighted_sum(weights: Mapping[str, float]) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a transform that adds the rewards, each times its weight; its names must equal those of the rewards.

    >>> weighted_sum({"math": 1.0, "format": 0.2})({"math": torch.tensor([1.0, 0.0]), "format": torch.tensor([1.0, 1.0])})
    tensor([1.2000, 0.2000])
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise RewardError(
                f"weighted_sum: the weight of {name!r} is {weight!r}. Accepted: a finite number."
            )
    if not weights:
        raise RewardError("weighted_sum needs a weight for each reward, but got none.")

    def transform(rewards: dict[str, Tensor]) -> Tensor:
        _check_names(weights, rewards)
        return functools.reduce(torch.add, (weight * rewards[name] for name, weight in weights.items()))

    return transform


def add(rewards: dict[str, Tensor]) -> Tensor:
    """Return the sum of all rewards (num_samples,)."""
    return torch.stack(list(rewards.values())).sum(0)


def multiply(rewards: dict[str, Tensor]) -> Tensor:
    """Return the product of all rewards (num_samples,), so that each is a condition for the others."""
    return torch.stack(list(rewards.values())).prod(0)


def _check_names(weights: Mapping[str, float], rewards: Mapping[str, Tensor]) -> None:
    for name in weights:
        if name not in rewards:
            raise RewardError(unknown("weighted_sum: reward", name, rewards))
    missing = [name for name in rewards if name not in weights]
    if missing:
        raise RewardError(
            f"weighted_sum has no weight for {', '.join(map(repr, missing))}; it has {dict(weights)}. Give 0 to only log it."
        )
