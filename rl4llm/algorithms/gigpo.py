"""GiGPO: Group-in-Group Policy Optimization for agents (Feng et al. 2025): turns are compared where states recur."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl4llm.algorithms.functional import group_advantages
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleRewards
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.algorithms.returns import turn_returns
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, Trajectory


@register_algorithm("gigpo")
@dataclass(slots=True)
class GiGPO(GRPO):
    """A turn's credit is its episode's plus how much more it earned than other turns from the same state (equation 8).

    Turns of a group belong together when the environment's last message before them has the same tokens. A turn from a state
    that occurred once is compared with nothing, and has the episode's credit alone.

    Options:
        step_coef: weight of the comparison of turns.
        turn_discount: per turn, of what was still to be earned.
    """

    step_coef: float = 1.0
    turn_discount: float = 0.95
    scale_rewards: ScaleRewards = "group"
    at_least_0: ClassVar[tuple[str, ...]] = (*GRPO.at_least_0, "step_coef")

    def credits(self, group: Group) -> Tensor:
        episode_G = self.compare(group.rewards_G)
        returns_GK = turn_returns(group, self.turn_discount)
        credits_GK = episode_G[:, None].expand_as(returns_GK).masked_fill(returns_GK.isnan(), torch.nan)
        for places in _by_state(group):
            rows, turns = (list(numbers) for numbers in zip(*places, strict=True))
            credits_GK[rows, turns] += self.step_coef * group_advantages(
                returns_GK[rows, turns], scale=self.scale_rewards == "group"
            )
        return credits_GK

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if self.turn_discount is None:
            raise ConfigError("algorithm.turn_discount=null is not accepted with algorithm.name='gigpo': 0 to 1.")


def _by_state(group: Group) -> list[list[tuple[int, int]]]:
    """(trajectory, turn) of the turns taken from each state."""
    places = defaultdict(list)
    for number, trajectory in enumerate(group.trajectories):
        for turn, state in enumerate(_states(trajectory)):
            places[state].append((number, turn))
    return list(places.values())


def _states(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """The tokens that stood before each turn since the last one."""
    states = []
    for record in trajectory.records:
        since: tuple[int, ...] = ()
        before = "context"
        for span in record:
            if span.author == "context":
                since = since + span.token_ids if before == "context" else span.token_ids
            elif before == "context":
                states.append(since)
            before = span.author
    return states
