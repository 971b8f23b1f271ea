"""Progress on the terminal: a small live panel, or plain lines where the output is a file or a pipe."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl4llm.runtime.terminal import Terminal, visible
from rl4llm.tracking.tracker import rounded

Mode = Literal["auto", "plain", "quiet", "verbose"]
REFRESH_PER_SECOND = 4
SECONDS_BETWEEN_LINES = 10.0
MARGIN = 3  # columns right of the panel: room for the "^C" that a terminal echoes, which would break the line otherwise
WIDEST = 120  # columns of the panel
NARROW = 72  # columns, below which times have a line of their own
BETWEEN = "   "
WINDOW = 20  # steps whose median says how long the next ones take
LONG_S = 5.0  # how long a phase lasts before the panel shows its duration
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 40
SPARKLINES = 10  # of a run, at least FEWEST steps apart
FEWEST = 10


class Console:
    """Shows a run: its phase, step, reward, held-out success, tokens/s, time left.

        with Console(total_steps=100) as console:
            console.phase("rollout")
            console.step(1, {"reward/mean": 0.4, "tokens/s": 4100.0})

    On a terminal a panel follows the run. Leaving the `with` block always restores the terminal, and other output appears
    above the panel. Elsewhere, and in the mode "plain", a line is written every `every`-th
    step and at least every ten seconds. About SPARKLINES times a run, a line shows the reward so far as bars, which stays
    in the scrollback. "verbose" has a line for each step, with all numbers that people ask for; "quiet"
    shows warnings only. The cursor is never hidden: a process that is killed could not show it again.

    `waiting` returns lines about who waits for what; it is called often.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Mode = "auto",
        title: str = "rl4llm",
        every: int | None = None,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        waiting: Callable[[], Sequence[str]] = lambda: (),
    ):
        self._progress = RunProgress(total_steps, now=now)
        self._quiet = mode == "quiet"
        self._verbose = mode == "verbose"
        self._title = title
        self._waiting = waiting
        self._every = 1 if self._verbose else every or max(1, total_steps // 50)
        self._file = file or sys.stdout
        self._encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._now = now
        self._seen_phases: set[str] = set()
        self._last_line = now()
        self._rich = Terminal(file=self._file, highlight=False, markup=False)
        terminal = self._file.isatty() and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self.on_terminal = terminal and mode != "plain"
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> Console:
        self._progress.start()
        if not self.on_terminal or self._quiet:
            return self
        ours = self._file is sys.stdout  # then later output to this terminal appears above the panel
        self._live = Live(
            console=self._rich,
            get_renderable=self._panel,
            refresh_per_second=REFRESH_PER_SECOND,
            redirect_stdout=ours,
            redirect_stderr=ours and sys.stderr.isatty(),
        )
        before = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._live.start()
        self._rich.show_cursor(True)
        self._handlers = [
            (handler, handler.stream) for handler in _handlers() if id(handler.stream) in before
        ]
        for handler, stream in self._handlers:
            handler.setStream(getattr(sys, before[id(stream)]))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            live, self._live = self._live, None
            for handler, stream in self._handlers:
                handler.setStream(stream)
            live.stop()

    def phase(self, name: str) -> None:
        """Begin a phase. Plain output prints each phase once."""
        self._progress.begin(name)
        if name not in self._seen_phases and not self.on_terminal:
            self.note(f"phase: {name}")
        self._seen_phases.add(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        progress = self._progress
        progress.take_step(step, metrics)
        last = step >= progress.total_steps
        due = step % self._every == 0 or self._now() - self._last_line >= SECONDS_BETWEEN_LINES
        if self._verbose or (not self.on_terminal and (due or last or step == 1)):
            left = progress.seconds_left
            ending = [f"{duration(left)} left"] if left is not None and not last else []
            facts = progress.facts() + (progress.details() if self._verbose else [])
            where = f"step {step}/{progress.total_steps}"
            self.note("  ".join([where, *ending, *(f"{label} {text}" for label, text in facts)]))
        shows = SPARKS.encode(self._encoding, "replace").decode(self._encoding) == SPARKS
        if shows and (step % max(FEWEST, progress.total_steps // SPARKLINES) == 0 or last):
            self.note(progress.sparkline())

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation on the held-out set."""
        self._progress.take_evaluation(step, metrics)
        if "accuracy" in metrics:
            self.note(f"held-out success at step {step}: {metrics['accuracy']:.1%}")

    def recall(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take over an evaluation from before this start of the run."""
        self._progress.take_evaluation(step, metrics)

    def alerts(self, open_since: Mapping[str, int]) -> None:
        """Show the open alerts and the step in which each began."""
        self._progress.alerts = dict(open_since)

    def note(self, text: str) -> None:
        """Print a line."""
        if self._quiet or not text:
            return
        self._print(Text(visible(text)))
        self._last_line = self._now()

    def warn(self, text: str) -> None:
        """Print a warning; quiet mode shows it too."""
        self._print(Text(visible(f"Warning: {text}"), style="bold yellow"))

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """Print a table. Long cells, such as paths, are never cut."""
        if self._quiet:
            return
        texts = [[visible(str(cell)) for cell in row] for row in rows]
        lines = [*([list(header)] if header else []), *texts]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        for number, line in enumerate([title, *aligned] if title else aligned):
            emphasis = "bold" if number < bool(title) + bool(header) else ""
            self._print(Text(line.rstrip(), style=emphasis))

    def _print(self, text: Text) -> None:
        if self.on_terminal:
            self._rich.print(text, soft_wrap=True)
            return
        try:
            self._file.write(text.plain.encode(self._encoding, "replace").decode(self._encoding) + "\n")
            self._file.flush()
        except OSError:  # training continues without output
            self._quiet = True

    def _panel(self) -> RenderableType:
        """Return the panel: step and bar in one line, numbers below; items that do not fit move to the next line."""
        progress, width = self._progress, max(20, min(self._rich.width - MARGIN, WIDEST))
        left = progress.seconds_left
        times = f"{progress.share:.0%}  {duration(progress.seconds)}" + (
            f"  {duration(left)} left" if left else ""
        )
        narrow = width < NARROW
        seconds = progress.phase_seconds
        doing = progress.phase + (f" {duration(seconds)}" if seconds >= LONG_S else "")
        where = Text.assemble(f"step {progress.step}/{progress.total_steps}", "  ", (f"{doing:<12}", "cyan"))
        bar = ProgressBar(total=1.0, completed=progress.share, complete_style="blue", finished_style="green")
        top = Table.grid(padding=(0, 1), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_row(where, *(["", times.partition("  ")[0]] if narrow else [bar, times]))
        shown = [Text.assemble((label, "dim"), " ", (text, "bold")) for label, text in progress.facts()]
        lines: list[RenderableType] = [
            top,
            *([Text(times.partition("  ")[2])] if narrow else []),
            *_rows(shown, width - 4),
        ]
        if progress.alerts:
            named = ", ".join(f"{visible(name)} since step {step}" for name, step in progress.alerts.items())
            lines.append(Text(f"alert: {named}", style="bold yellow"))
        lines += [
            Text(visible(line), style="cyan", overflow="ellipsis", no_wrap=True) for line in self._waiting()
        ]
        title = Text(visible(self._title), style="bold")
        title.truncate(width - 6, overflow="ellipsis")  # a longer one widens the panel
        return Panel(Group(*lines), title=title, title_align="left", border_style="blue", width=width)


def _rows(parts: Sequence[Text], width: int) -> list[Text]:
    """Return lines with as many whole parts as fit."""
    rows: list[list[Text]] = [[]]
    for part in parts:
        if rows[-1] and sum(one.cell_len + len(BETWEEN) for one in rows[-1]) + part.cell_len > width:
            rows.append([])
        rows[-1].append(part)
    return [Text(BETWEEN, overflow="ellipsis", no_wrap=True).join(row) for row in rows]


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers of all loggers that write to a stream other than a file."""
    named = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    for handler in {id(one): one for logger in (logging.root, *named) for one in logger.handlers}.values():
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            yield handler


@dataclass(slots=True)
class RunProgress:
    """The state that the console shows: step, numbers, time left."""

    total_steps: int
    now: Callable[[], float] = time.monotonic
    phase: str = "starting"
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
    _phase_started: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self._started = self._last = self.now()

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self._phase_started = phase, self.now()

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
    def share(self) -> float:
        """Return how much of the run is finished, 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 1.0

    @property
    def seconds(self) -> float:
        """Return the seconds since this process started the run."""
        return 0.0 if self._started is None else self.now() - self._started

    @property
    def phase_seconds(self) -> float:
        """Return the seconds since the phase began."""
        return 0.0 if self._phase_started is None else self.now() - self._phase_started

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds that are left at the median pace of the last steps; None before the first step."""
        if not self._durations:
            return None
        since = self.now() - (self._last or 0.0)
        return max(0.0, (self.total_steps - self.step) * statistics.median(self._durations) - since)

    def sparkline(self) -> str:
        """Return the reward of the steps so far as bars, means of about as many steps each; "" for fewer than FEWEST."""
        count = len(self.rewards)
        if count < FEWEST:
            return ""
        columns = min(count, SPARK_COLUMNS)
        edges = [count * column // columns for column in range(columns + 1)]
        means = [statistics.fmean(value for _, value in self.rewards[a:b]) for a, b in pairwise(edges)]
        low, high = min(means), max(means)
        bars = "".join(SPARKS[round((mean - low) / (high - low or 1) * (len(SPARKS) - 1))] for mean in means)
        return f"reward {bars} {means[0]:.3f} → {means[-1]:.3f}  steps {self.rewards[0][0]} to {self.step}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the numbers to show, as label and string, without those that were never measured."""
        metrics, held_out = self.metrics, None
        if self.accuracy is not None:
            first = "" if self.evaluated_step == self.first_step else f", from {self.first_accuracy:.1%}"
            held_out = f"{self.accuracy:.1%} (step {self.evaluated_step}{first})"
        facts = [
            ("reward", _number(metrics.get("reward/mean"))),
            ("loss", _number(metrics.get("loss")) if "reward/mean" not in metrics else None),
            ("held-out", held_out),
            ("tokens/s", _count(metrics.get("tokens/s"))),
            ("length", _count(metrics.get("completion_length/mean"))),
            ("failures", _count(metrics.get("failures") or None)),
            ("update", "none: nothing to learn from" if metrics.get("update/empty") == 1.0 else None),
        ]
        return [(label, text) for label, text in facts if text is not None]

    def details(self) -> list[tuple[str, str]]:
        """Return more numbers, and the seconds of each phase."""
        metrics = self.metrics
        names = {
            "loss": "loss", "grad norm": "grad_norm", "lr": "lr", "kl": "kl", "clipped": "clip_fraction",
            "entropy": "entropy" if "entropy" in metrics else "surprise", "mismatch": "mismatch/mean",
            "truncated": "truncated", "no spread": "groups/zero_spread", "memory GB": "resources/rss_gb",
        }  # fmt: skip
        if "reward/mean" not in metrics:
            del names["loss"]  # is among the facts
        shown = [
            (label, rounded(metrics[name], 3))
            for label, name in names.items()
            if metrics.get(name) is not None
        ]
        times = [(name[5:], f"{value:.1f} s") for name, value in metrics.items() if name.startswith("time/")]
        return shown + times


def duration(seconds: float) -> str:
    """Format seconds for people: 0:07, 12:30, 3:05:00, 2 d 04:10."""
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
