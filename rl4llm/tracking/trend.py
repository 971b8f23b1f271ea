"""Whether the reward of a run has moved, by the noise of the run itself."""

from __future__ import annotations

import math
import statistics
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
    """The reward of the steps that changed the policy.

    The error is Welch's, from how the means of steps differ within a third. So it contains the noise of samples, groups and
    prompts alike.
    """

    _rewards: list[float] = field(default_factory=list)
    _scale: float = 0.0  # sum over steps

    def take(self, row: Mapping[str, float]) -> None:
        """Take the metrics of a step; one without a reward or without an update of the policy does not count."""
        reward, scale = (row.get(name, math.nan) for name in ("reward/mean", "reward/std"))
        if not row.get("grad_norm") or not math.isfinite(reward + scale):
            return
        self._rewards.append(reward)
        self._scale += scale

    def change(self) -> Change | None:
        """Return how the reward changed, or None after too few steps."""
        steps = len(self._rewards)
        if steps < FEWEST:
            return None
        third = steps // 3
        parts = self._rewards[:third], self._rewards[-third:]
        (begin, end), (noise, other) = map(statistics.fmean, parts), map(statistics.variance, parts)
        return Change(steps, begin, end, math.sqrt((noise + other) / third), self._scale / steps)
