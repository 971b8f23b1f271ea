"""GDPO: Group reward-Decoupled Normalization Policy Optimization, for several rewards (Liu et al. 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.algorithms.functional import deviation, differ
from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_algorithm import Needs, Total
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group


@dataclass(slots=True)
class GDPO(GRPO):
    """Normalize each reward within its group, add them up with weights, and divide by the deviation of the whole step.

    GRPO adds rewards first, so that one with a large spread hides the others, and different mixtures with an equal sum get
    equal advantages. The second division keeps the advantages at one scale for any number of rewards. It is over
    trajectories, as in TRL; verl's is over tokens, so that long answers weigh more, and NeMo-RL has none.

    The combined reward is only logged: its weights, rewards of turns and rewards that are not named do not train.

    Options:
        reward_weights: weight of each reward that trains, by its name.
    """

    reward_weights: dict[str, float] = field(default_factory=dict)
    scale_rewards: ClassVar[Literal["group"]] = "group"  # type: ignore[misc]
    turn_discount: ClassVar[None] = None  # type: ignore[misc]  # rewards by name are those of whole episodes
    kl_in: ClassVar[Literal["loss"]] = "loss"  # type: ignore[misc]  # a penalty in the reward would be a part of none of them

    def needs(self) -> Needs:
        needs = GRPO.needs(self)
        return replace(needs, rewards=(*self.reward_weights, *needs.rewards))

    def keep(self, group: Group) -> bool:
        if not self.filter_groups or self.filter_groups_by is not None:
            return GRPO.keep(self, group)
        return any(differ(rewards_G.tolist()) for rewards_G in self._rewards(group).values())

    def credits(self, group: Group) -> Tensor:
        weighted = [
            self.reward_weights[name] * self.compare(rewards_G)
            for name, rewards_G in self._rewards(group).items()
        ]
        return torch.stack(weighted).sum(0)

    def batch_credits(self, groups: Sequence[Group], total: Total) -> list[Tensor]:
        credits = [self.credits(group) for group in groups]  # those of each group add up to 0
        scale = deviation(credits, total)
        return [credits_G / (scale + 1e-6) for credits_G in credits]

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if not self.reward_weights:
            raise ConfigError(
                "algorithm.reward_weights is not set. Give each reward that trains a weight, such as {math: 1, format: 0.2}."
            )

    def _rewards(self, group: Group) -> dict[str, Tensor]:
        return {
            name: torch.tensor([one.rewards[name] for one in group.trajectories], dtype=torch.float64)
            for name in self.reward_weights
        }
