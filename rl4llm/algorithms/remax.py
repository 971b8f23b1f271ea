"""ReMax: REINFORCE with the reward of the greedy answer as its baseline (Li et al. 2023, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import WITHOUT_GROUPS, Choices, ScaleRewards
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.types import Group


@register_algorithm("remax")
@dataclass(slots=True)
class ReMax(GRPO):
    """The policy's most probable answer is the one to beat: one more episode per prompt, at temperature 0, never trained on.

    A prompt whose greedy episode failed has no baseline and teaches nothing.
    """

    scale_rewards: ScaleRewards = "none"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    credits_turns: ClassVar[bool] = False
    choices: ClassVar[Choices] = {**GRPO.choices, **WITHOUT_GROUPS}

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), greedy_baseline=True)

    def keep(self, group: Group) -> bool:
        return group.baseline is not None and GRPO.keep(self, group)

    def credits(self, group: Group) -> Tensor:
        return group.rewards_G - (group.baseline.reward if group.baseline else group.rewards_G)
