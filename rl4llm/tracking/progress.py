"""What is known of a run while it runs: step, numbers, time left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WINDOW = 20  # steps whose median says how long the next ones take


@dataclass(slots=True)
class Progress:
    """The state behind the console."""

    total_steps: int
    now: Callable[[], float] = time.monotonic
    phase: str = "starting"
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int = 0
    accuracy: float | None = None
    first_accuracy: float | None = None
    first_step: int = 0  # at which that was measured
    alerts: dict[str, int] = field(default_factory=dict)  # by name, the step in which each began
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: float | None = None
    _started: float | None = None
    _phase_started: float | None = None

    def start(self) -> None:
        """The clock runs from here."""
        self._started = self._last = self.now()

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self.phase, self._phase_started = phase, self.now()

    def take_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished."""
        now = self.now()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now
        self.step, self.metrics = step, dict(metrics)

    def take_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out set was measured."""
        self.evaluated_step, self.accuracy = step, metrics.get("accuracy")
        if self.first_accuracy is None:
            self.first_accuracy, self.first_step = self.accuracy, step

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 1.0

    @property
    def seconds(self) -> float:
        """Since the start of this process's part of the run."""
        return 0.0 if self._started is None else self.now() - self._started

    @property
    def phase_seconds(self) -> float:
        """Since the phase began."""
        return 0.0 if self._phase_started is None else self.now() - self._phase_started

    @property
    def seconds_left(self) -> float | None:
        """The steps that remain at the median pace of the last ones; None before the first step."""
        if not self._durations:
            return None
        since = self.now() - (self._last or 0.0)
        return max(0.0, (self.total_steps - self.step) * statistics.median(self._durations) - since)

    def facts(self) -> list[tuple[str, str]]:
        """The numbers to show, as label and text; what was never measured is left out."""
        metrics = self.metrics
        facts = [
            ("reward", _number(metrics.get("reward/mean"))),
            ("loss", _number(metrics.get("loss")) if "reward/mean" not in metrics else None),
            ("held-out", self._held_out()),
            ("tokens/s", _count(metrics.get("tokens/s"))),
            ("length", _count(metrics.get("completion_length/mean"))),
            ("failures", _count(metrics.get("failures") or None)),
        ]
        return [(label, text) for label, text in facts if text is not None]

    def details(self) -> list[tuple[str, str]]:
        """More numbers, and the seconds of each phase."""
        metrics = self.metrics
        names = {
            "loss": "loss", "grad norm": "grad_norm", "lr": "lr", "kl": "kl", "clipped": "clip_fraction",
            "entropy": "entropy" if "entropy" in metrics else "surprise", "mismatch": "mismatch/mean",
            "truncated": "truncated", "no spread": "groups/zero_spread", "memory GB": "resources/rss_gb",
        }  # fmt: skip
        if "reward/mean" not in metrics:
            del names["loss"]  # is among the facts
        shown = [(label, f"{metrics[name]:.3g}") for label, name in names.items() if metrics.get(name) is not None]
        times = [(name[5:], f"{value:.1f} s") for name, value in metrics.items() if name.startswith("time/")]
        return shown + times

    def _held_out(self) -> str | None:
        if self.accuracy is None:
            return None
        first = "" if self.evaluated_step == self.first_step else f", from {self.first_accuracy:.1%}"
        return f"{self.accuracy:.1%} (step {self.evaluated_step}{first})"


def duration(seconds: float) -> str:
    """Seconds for people: 0:07, 12:30, 3:05:00, 2 d 04:10."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _count(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
