"""GiGPO: Group-in-Group Policy Optimization for agents (Feng et al. 2025): turns are compared where states recur."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.functional import group_advantages
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleRewards
from rl4llm.algorithms.returns import turn_returns
from rl4llm.core.schema import Fraction, NonNegative
from rl4llm.core.types import Group, Trajectory


@dataclass(slots=True)
class GiGPO(GRPO):
    """Credit a turn with its episode's credit plus its advantage over other turns from the same state (equation 8).

    Turns of a group start from the same state if the environment's last message before them has the same tokens. A turn from
    a state that occurs once has the episode's credit alone.

    Options:
        step_coef: weight of the comparison of turns.
        turn_discount: discount per turn of the reward to go.
    """

    step_coef: NonNegative = 1.0
    turn_discount: Fraction = 0.95
    scale_rewards: ScaleRewards = "group"

    def credits(self, group: Group) -> Tensor:
        episode_G = self.compare(group.rewards_G)
        returns_GK = turn_returns(group, self.turn_discount)
        credits_GK = episode_G[:, None].repeat(1, returns_GK.shape[1])
        places = defaultdict(list)  # (trajectory, turn) of the turns from each state
        for number, trajectory in enumerate(group.trajectories):
            for turn, state in enumerate(_states(trajectory)):
                places[state].append((number, turn))
        for alike in places.values():
            rows, turns = (list(numbers) for numbers in zip(*alike, strict=True))
            credits_GK[rows, turns] += self.step_coef * group_advantages(
                returns_GK[rows, turns], scale=self.scale_rewards == "group"
            )
        return credits_GK


def _states(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Return, for each turn, the tokens since the turn before it."""
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
