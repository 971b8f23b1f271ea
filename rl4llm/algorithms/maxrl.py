"""MaxRL: Maximum Likelihood Reinforcement Learning divides by the success rate of a prompt (Tajwar et al. 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.algorithms.grpo import GRPO


@dataclass(slots=True)
class MaxRL(GRPO):
    """Credit a sample with (reward - mean) / share of success in its group, so that rare successes weigh most.

    The gradient of the log of the success rate is the sum of those of pass@j / j over all j. On the policy, a group of n
    samples estimates the first n - 1 terms without bias. GRPO's deviation instead raises easy and hard prompts alike.

    Rewards are shares of success, so their mean is the divisor, and their scale cancels. The paper has no negative ones. A
    penalty lowers a sample beside the others, but counts as 0 in the divisor, or a mean near 0 would make credits of any
    size. A group without a positive reward gets 0.
    """

    aggregation: str = "token"
    scale_rewards: ClassVar[Literal["none"]] = "none"  # type: ignore[misc]  # the share of success scales them
    kl_in: ClassVar[Literal["loss"]] = "loss"  # type: ignore[misc]  # a penalty in the reward would not be one of success

    def compare(self, rewards_G: Tensor) -> Tensor:
        success = rewards_G.clamp(min=0).mean()
        return (rewards_G - rewards_G.mean()) / success if success > 0 else torch.zeros_like(rewards_G)
