"""ReMax: REINFORCE that takes the greedy answer's reward as its baseline (Li et al. 2023, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.types import Group


@dataclass(slots=True)
class ReMax(GRPO):
    """Compare answers with the greedy one: one more episode per prompt, at temperature 0, which is never trained on.

    A prompt whose greedy episode failed has no baseline and does not train.
    """

    scale_rewards: ScaleBatch = "none"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    turn_discount: ClassVar[None] = None  # type: ignore[misc]  # the reply to compare with has other turns

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), greedy_baseline=True)

    def keep(self, group: Group) -> bool:
        return group.baseline is not None and GRPO.keep(self, group)

    def credits(self, group: Group) -> Tensor:
        return group.rewards_G - (group.baseline.reward if group.baseline else group.rewards_G)
