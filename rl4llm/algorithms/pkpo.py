"""PKPO: Pass-at-k Policy Optimization, for policies that are used with k samples (Walder and Karkhanis 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Count


@dataclass(slots=True)
class PKPO(GRPO):
    """Raise the expected best reward of k samples; with rewards of 0 and 1 that is pass@k.

    Wrong answers beside a right one lose little, so the policy explores. A sample is credited with the mean of the best
    rewards of all sets of k samples that contain it, less the mean of all sets of k. On the policy, the mean over the group
    of credit times gradient of the log-prob is unbiased, and k = 1 is RLOO. verl's "grpo_passk" credits the best answer
    alone. Groups that failures left with at most k samples get 0.

    Options:
        k: number of samples, below `rollout.group_size`.
    """

    k: Count = 2
    scale_rewards: ScaleBatch = "none"
    aggregation: str = "token"

    def compare(self, rewards_G: Tensor) -> Tensor:
        size = len(rewards_G)
        if size <= self.k:
            return torch.zeros_like(rewards_G)
        best_G = best_with(rewards_G, self.k)
        return (best_G - best_G.mean()) * (size * self.k / (size - self.k))

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if self.k >= group_size:
            raise ConfigError(
                f"algorithm.k={self.k} is not accepted with rollout.group_size={group_size}: there would be no second set "
                f"of k samples to compare with. Use at most {group_size - 1}."
            )


def best_with(rewards_G: Tensor, k: int) -> Tensor:
    """Return, for each reward, the mean of the best rewards of all sets of k that contain it (G,); k is at most G."""
    sorted_G, order_G = rewards_G.sort()
    sets = math.comb(len(rewards_G) - 1, k - 1)
    # of the sets with a reward: the share in which it is the best, and in which the reward at a higher place is
    itself_G = sorted_G.new_tensor([math.comb(place, k - 1) / sets for place in range(len(order_G))])
    other_G = torch.zeros_like(itself_G)
    if k > 1:
        other_G[1:] = sorted_G.new_tensor(
            [math.comb(place - 1, k - 2) / sets for place in range(1, len(order_G))]
        )
    above_G = (other_G * sorted_G).flip(0).cumsum(0).flip(0) - other_G * sorted_G
    return torch.empty_like(rewards_G).scatter(0, order_G, itself_G * sorted_G + above_G)
