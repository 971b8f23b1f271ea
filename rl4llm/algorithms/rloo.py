"""RLOO: REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rl4llm.algorithms.functional import leave_one_out
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import WITHOUT_GROUPS, Choices, ScaleRewards
from rl4llm.algorithms.registry import register_algorithm


@register_algorithm("rloo")
@dataclass(slots=True)
class RLOO(GRPO):
    """Each reward is compared with the mean of the others of its prompt, which keeps the gradient unbiased.

    On the policy the clipped loss has REINFORCE's gradient. A group of one gets 0; verl's loop passes on its raw reward.
    """

    scale_rewards: ScaleRewards = "none"
    aggregation: str = "token"

    choices: ClassVar[Choices] = {**GRPO.choices, **WITHOUT_GROUPS}

    def compare(self, rewards_G: Tensor) -> Tensor:
        return leave_one_out(rewards_G)
