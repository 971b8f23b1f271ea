"""Whether the reward of a run has moved, by the noise of the run itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FEWEST = 20  # steps that can tell noise from progress


@dataclass(frozen=True, slots=True)
class Change:
    """How the mean of a series changed from its first third to its last: `error` is one standard deviation of `end - begin`.

    `scale` is the usual standard deviation of one episode.
    """

    steps: int
    begin: float
    end: float
    error: float
    scale: float

    @property
    def largest(self) -> float:
        """Return the largest change that the noise allows, in either direction, at two standard deviations."""
        return abs(self.end - self.begin) + 2 * self.error

    @property
    def is_noise(self) -> bool:
        """Return whether the change is within three standard deviations: it is looked at after every step."""
        return abs(self.end - self.begin) <= 3 * self.error


@dataclass(slots=True)
class Trend:
    """The reward of the steps that changed the policy; each step costs the same, however many came before.

    The error is Welch's, from how the means of steps differ within a third. So it contains the noise of samples, groups and
    prompts alike.
    """

    _sums: list[tuple[float, float]] = field(
        default_factory=lambda: [(0.0, 0.0)]
    )  # of values and squares so far
    _origin: float = 0.0  # the first value: squares of differences from it keep their digits
    _scale: float = 0.0  # sum over steps

    def take(self, row: Mapping[str, float]) -> None:
        """Take the metrics of a step; one without a reward or without an update of the policy does not count."""
        reward, scale = (row.get(name, math.nan) for name in ("reward/mean", "reward/std"))
        if not row.get("grad_norm") or not math.isfinite(reward + scale):
            return
        self._origin = self._origin if len(self._sums) > 1 else reward
        total, squares = self._sums[-1]
        self._sums.append((total + reward - self._origin, squares + (reward - self._origin) ** 2))
        self._scale += scale

    def change(self) -> Change | None:
        """Return how the reward changed, or None after too few steps."""
        steps = len(self._sums) - 1
        if steps < FEWEST:
            return None
        third = steps // 3
        (begin, noise), (end, other) = self._part(0, third), self._part(steps - third, steps)
        error = math.sqrt((noise + other) / third)
        return Change(steps, self._origin + begin, self._origin + end, error, self._scale / steps)

    def _part(self, first: int, last: int) -> tuple[float, float]:
        """Return the mean and the variance of the steps from `first` to before `last`."""
        count = last - first
        total, squares = (b - a for a, b in zip(self._sums[first], self._sums[last], strict=True))
        mean = total / count
        return mean, max(0.0, squares - count * mean**2) / (count - 1)
