"""Progress as lines of text: one for a step, with what is left of the run, and one for a warning."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from rl4llm.runtime.terminal import visible
from rl4llm.tracking.curve import bars
from rl4llm.tracking.tracker import rounded

Mode = Literal["auto", "plain", "quiet", "verbose"]
SECONDS_BETWEEN_LINES = 1.0  # of faster steps only every k-th has a line
LINES = 50  # that faster steps have
WINDOW = 20  # steps whose median says how long the next ones take
SPARKLINES = 10  # of a run, at least FEWEST steps apart
FEWEST = 10
DETAILS = (
    "loss", "grad_norm", "lr", "kl", "clip_fraction", "entropy", "surprise", "mismatch/mean", "truncated",
    "groups/zero_spread", "resources/rss_gb",
)  # fmt: skip


class Console:
    """Shows a run: its phases, steps, reward, held-out success, tokens/s, time left.

        with Console(total_steps=100) as console:
            console.phase("rollout")
            console.step(1, {"reward/mean": 0.4, "tokens/s": 4100.0})

    About SPARKLINES times a run, a line shows the reward so far as bars. "verbose" has all numbers that people ask for;
    "quiet" shows warnings only. "auto" and "plain" differ in a notebook, where "auto" is a picture.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Mode = "auto",
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._progress = RunProgress(total_steps, now=now)
        self._quiet = mode == "quiet"
        self._verbose = mode == "verbose"
        self._every = 1 if self._verbose else max(1, total_steps // LINES)
        self._file = file or sys.stdout
        self._encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._now = now
        self._phases: set[str] = set()
        self._last_line = now()

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Print nothing more."""

    def phase(self, name: str) -> None:
        """Begin a phase; each is printed once."""
        if name not in self._phases:
            self.note(f"phase: {name}")
        self._phases.add(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        progress = self._progress
        progress.take_step(step, metrics)
        is_end = step >= progress.total_steps
        slow = self._now() - self._last_line >= SECONDS_BETWEEN_LINES
        if slow or is_end or step == 1 or step % self._every == 0:
            ending = [] if is_end else [f"{duration(progress.seconds_left or 0)} left"]
            facts = progress.facts() + (progress.details() if self._verbose else [])
            where = f"step {step}/{progress.total_steps}"
            self.note("  ".join([where, *ending, *(f"{label} {text}" for label, text in facts)]))
        apart = max(FEWEST, progress.total_steps // SPARKLINES)
        if len(progress.rewards) >= FEWEST and (is_end or step % apart == 0):
            self.note(f"reward {bars(progress.rewards)}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation on the held-out set."""
        self.recall(step, metrics)
        if "accuracy" in metrics:
            self.note(f"held-out success at step {step}: {metrics['accuracy']:.1%}")

    def recall(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take over an evaluation from before this start of the run."""
        self._progress.take_evaluation(step, metrics)

    def alerts(self, open_since: Mapping[str, int]) -> None:
        """Record the open alerts and the step in which each began."""
        self._progress.alerts = dict(open_since)

    def note(self, text: str) -> None:
        if text and not self._quiet:
            self._print(text)
            self._last_line = self._now()

    def warn(self, text: str) -> None:
        """Print a warning; quiet mode shows it too."""
        self._print(f"Warning: {text}")

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """Print a table. Long cells, such as paths, are never cut."""
        lines = [[*map(str, line)] for line in ([header, *rows] if header else rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        for line in [title, *aligned] if title else aligned:
            self.note(line)

    def _print(self, text: str) -> None:
        line = visible(text).encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError:  # training continues without output
            self._quiet = True


@dataclass(slots=True)
class RunProgress:
    """The state that the console shows: step, numbers, time left."""

    total_steps: int
    now: Callable[[], float] = time.monotonic
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # with their steps, since this start
    evaluated_step: int = 0
    accuracy: float | None = None
    first_accuracy: float | None = None
    first_step: int = 0  # at which that was measured
    alerts: dict[str, int] = field(default_factory=dict)  # by name, the step in which each began
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: float | None = None
    _started: float | None = None

    def start(self) -> None:
        self._started = self._last = self.now()

    def take_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        now = self.now()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now
        self.step, self.metrics = step, dict(metrics)
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self.rewards.append((step, reward))

    def take_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation on the held-out set."""
        self.evaluated_step, self.accuracy = step, metrics.get("accuracy")
        if self.first_accuracy is None:
            self.first_accuracy, self.first_step = self.accuracy, step

    @property
    def seconds(self) -> float:
        """Return the seconds since this process started the run."""
        return 0.0 if self._started is None else self.now() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds that are left at the median pace of the last steps; None before the first step."""
        if not self._durations:
            return None
        since = self.now() - (self._last or 0.0)
        return max(0.0, (self.total_steps - self.step) * statistics.median(self._durations) - since)

    def facts(self) -> list[tuple[str, str]]:
        """Return the numbers to show, as label and string, without those that were never measured."""
        metrics, held_out = self.metrics, None
        if self.accuracy is not None:
            baseline = "" if self.evaluated_step == self.first_step else f", from {self.first_accuracy:.1%}"
            held_out = f"{self.accuracy:.1%} (step {self.evaluated_step}{baseline})"
        learned = "reward/mean" if "reward/mean" in metrics else "loss"
        facts = [
            (learned.partition("/")[0], f"{metrics[learned]:.3f}" if learned in metrics else None),
            ("held-out", held_out),
            ("tokens/s", _count(metrics.get("tokens/s"))),
            ("length", _count(metrics.get("completion_length/mean"))),
            ("failures", _count(metrics.get("failures") or None)),
            ("update", "none: nothing to learn from" if metrics.get("update/empty") == 1.0 else None),
        ]
        return [(label, text) for label, text in facts if text is not None]

    def details(self) -> list[tuple[str, str]]:
        """Return more numbers, and the seconds of each phase."""
        numbers = {name: value for name, value in self.metrics.items() if value is not None}
        times = [(name[5:], f"{value:.1f} s") for name, value in numbers.items() if name.startswith("time/")]
        return [(name, rounded(numbers[name], 3)) for name in DETAILS if name in numbers] + times


def duration(seconds: float) -> str:
    """Format seconds for people: 0:07, 12:30, 3:05:00, 2 d 04:10."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _count(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
