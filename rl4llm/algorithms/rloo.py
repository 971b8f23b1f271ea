"""RLOO: REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.functional import leave_one_out
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch


@dataclass(slots=True)
class RLOO(GRPO):
    """Compare each reward with the mean of the others of its prompt, which keeps the gradient unbiased.

    On-policy, the clipped loss has REINFORCE's gradient. A group of one gets 0; verl's loop passes on its raw reward.
    """

    scale_rewards: ScaleBatch = "none"
    aggregation: str = "token"

    def compare(self, rewards_G: Tensor) -> Tensor:
        return leave_one_out(rewards_G)
