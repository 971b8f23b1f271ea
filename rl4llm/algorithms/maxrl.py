"""MaxRL: Maximum Likelihood Reinforcement Learning divides by the success rate of a prompt (Tajwar et al. 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.errors import RewardError


@dataclass(slots=True)
class MaxRL(GRPO):
    """Credit a sample with (reward - mean) / mean of its group, so that rare successes weigh most.

    The gradient of the log of the success rate is the sum of those of pass@j / j over all j. On the policy, a group of n
    samples estimates the first n - 1 terms without bias. GRPO's deviation instead raises easy and hard prompts alike. A
    group without a success gets 0. Rewards are shares of success: their scale cancels, negative ones raise RewardError.
    """

    aggregation: str = "token"
    scale_rewards: ClassVar[Literal["none"]] = "none"  # type: ignore[misc]  # the mean scales them
    kl_in: ClassVar[Literal["loss"]] = "loss"  # type: ignore[misc]  # a penalty would make rewards negative

    def compare(self, rewards_G: Tensor) -> Tensor:
        if (rewards_G < 0).any():
            raise RewardError(
                f"MaxRL divides by the mean reward of a group, but a reward is {rewards_G.min():g}. Use rewards of 0 and "
                "more; the rewards clip and scale change others."
            )
        mean = rewards_G.mean()
        return (rewards_G - mean) / mean if mean > 0 else torch.zeros_like(rewards_G)
