"""Combine several rewards into one: functions that fit `reward_transform_fn`.

Each takes the rewards by name, tensors of shape (num_samples,), and returns one tensor of that shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl4llm.core.errors import RewardError


def weighted_sum(weights: Mapping[str, float]) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a transform that adds the rewards, each times its weight; its names must equal those of the rewards.

    >>> weighted_sum({"math": 1.0, "format": 0.2})({"math": torch.tensor([1.0, 0.0]), "format": torch.tensor([1.0, 1.0])})
    tensor([1.2000, 0.2000])
    """

    def transform(rewards: dict[str, Tensor]) -> Tensor:
        if weights.keys() != rewards.keys():
            raise RewardError(
                f"weighted_sum: the weights {dict(weights)} are not those of the rewards {', '.join(rewards)}. Give 0 to "
                "only log one."
            )
        return functools.reduce(torch.add, (weight * rewards[name] for name, weight in weights.items()))

    return transform


def add(rewards: dict[str, Tensor]) -> Tensor:
    """Return the sum of all rewards (num_samples,)."""
    return torch.stack(list(rewards.values())).sum(0)


def multiply(rewards: dict[str, Tensor]) -> Tensor:
    """Return the product of all rewards (num_samples,), so that each is a condition for the others."""
    return torch.stack(list(rewards.values())).prod(0)
