"""RAE: Role-conditioned Advantage Estimation, for roles that play one another (Liu et al. 2025, "SPIRAL")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch
from rl4llm.core.schema import Fraction
from rl4llm.core.types import Group, Trajectory


@dataclass(slots=True)
class RAE(GRPO):
    """Compare each reward with the running mean of its role in its environment, which needs no group.

    A role may win more often than another whatever it says, as the one that moves first. A baseline per role takes that off,
    and a baseline over time compares episodes whose opponents, and so whose prompts, differ.

    The mean begins at 0, and `decay` is what a trajectory leaves of it: n trajectories of a step with mean r make it
    decay^n b + (1 - decay^n) r. The paper updates it trajectory by trajectory, which depends on their order. Credits use the
    mean before the step, which does not depend on what they credit.

    Options:
        decay: share of the running mean that remains after one trajectory.
    """

    decay: Fraction = 0.95
    scale_rewards: ScaleBatch = "none"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    turn_discount: ClassVar[None] = None  # type: ignore[misc]  # the mean is that of whole episodes
    _means: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def credits(self, group: Group) -> Tensor:
        rewards_G = group.rewards_G
        return rewards_G - rewards_G.new_tensor(
            [self._means.get(_seat(one), 0.0) for one in group.trajectories]
        )

    def observe(self, groups: Sequence[Group], everyone: Callable[[Any], list[Any]]) -> None:
        sums: dict[str, tuple[int, float]] = {}
        members = [(_seat(one), one.reward) for group in groups for one in group.trajectories]
        for seat, reward in (member for part in everyone(members) for member in part):
            count, summed = sums.get(seat, (0, 0.0))
            sums[seat] = count + 1, summed + reward
        for seat, (count, summed) in sums.items():
            remains = self.decay**count
            self._means[seat] = remains * self._means.get(seat, 0.0) + (1 - remains) * summed / count

    def state(self) -> dict[str, Any]:
        return GRPO.state(self) | {"means": dict(self._means)}

    def restore(self, state: Mapping[str, Any]) -> None:
        GRPO.restore(self, state)
        self._means = dict(state.get("means", {}))


def _seat(trajectory: Trajectory) -> str:
    return f"{trajectory.part}/{trajectory.role}"
