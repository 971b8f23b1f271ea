"""Progress on the terminal: a small live panel, or plain lines where the output is a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl4llm.tracking.progress import Progress, duration

REFRESH_PER_SECOND = 4
SECONDS_BETWEEN_LINES = 10.0
MARGIN = 3  # columns right of the panel: room for the "^C" that a terminal echoes, which would break the line otherwise


class Console:
    """Shows a run: phase, step, reward, held-out success, tokens/s, time left.

        with Console(total_steps=100) as console:
            console.phase("rollout")
            console.step(1, {"reward/mean": 0.4, "tokens/s": 4100.0})

    On a terminal a panel follows the run; leaving the `with` block, however it happens, gives the terminal back. Elsewhere
    a line is written every `every`-th step and at least every ten seconds. `quiet` shows warnings only.
    """

    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        title: str = "rl4llm",
        every: int | None = None,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._progress = Progress(total_steps, now=now)
        self._quiet = quiet
        self._title = title
        self._every = every or max(1, total_steps // 50)
        self._file = file or sys.stdout
        self._now = now
        self._seen_phases: set[str] = set()
        self._last_line = now()
        self._rich = RichConsole(file=self._file, highlight=False, markup=False, emoji=False)
        self._on_terminal = self._file.isatty() and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live: Live | None = None

    def __enter__(self) -> Console:
        self._progress.start()
        if self._on_terminal and not self._quiet:
            refresh = REFRESH_PER_SECOND
            self._live = Live(console=self._rich, get_renderable=self._panel, refresh_per_second=refresh)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            live, self._live = self._live, None
            live.stop()

    def phase(self, name: str) -> None:
        """What the run is doing now. In plain output each phase is told once."""
        self._progress.phase = name
        if name not in self._seen_phases and not self._on_terminal:
            self._line(f"phase: {name}")
        self._seen_phases.add(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished."""
        self._progress.take_step(step, metrics)
        last = step >= self._progress.total_steps
        due = step % self._every == 0 or self._now() - self._last_line >= SECONDS_BETWEEN_LINES
        if not self._on_terminal and (due or last or step == 1):
            self._line("  ".join([self._where(), *(f"{label} {text}" for label, text in self._progress.facts())]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out set was measured."""
        self._progress.take_evaluation(step, metrics)
        if "accuracy" in metrics:
            self.note(f"held-out success at step {step}: {metrics['accuracy']:.1%}")

    def recall(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out set was measured before this start of the run."""
        self._progress.take_evaluation(step, metrics)

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._line(text)

    def warn(self, text: str) -> None:
        """Something that must not be overlooked; shown also when quiet."""
        self._print(Text(f"Warning: {text}", style="bold yellow"))

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """A table below the rest, cells as text. Long cells, such as paths, are never cut."""
        if self._quiet:
            return
        texts = [[str(cell) for cell in row] for row in rows]
        lines = [*([list(header)] if header else []), *texts]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        for number, line in enumerate([title, *aligned] if title else aligned):
            emphasis = "bold" if number < bool(title) + bool(header) else ""
            self._print(Text(line.rstrip(), style=emphasis))

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        self._print(Text(text))
        self._last_line = self._now()

    def _print(self, text: Text) -> None:
        if self._on_terminal:
            self._rich.print(text, soft_wrap=True)
        else:
            self._write(text.plain)

    def _write(self, text: str) -> None:
        """A line into a file or pipe. When it cannot be written there is nowhere left to say so, and training goes on."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        try:
            self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._file.flush()
        except OSError:
            self._quiet = True

    def _where(self) -> str:
        progress = self._progress
        left = progress.seconds_left
        ending = f"  {duration(left)} left" if left is not None and progress.step < progress.total_steps else ""
        return f"step {progress.step}/{progress.total_steps}{ending}"

    def _panel(self) -> RenderableType:
        """Step and bar in one line, the numbers below it; numbers that do not fit move to the next line."""
        progress = self._progress
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        left = progress.seconds_left
        ending = f"{progress.share:.0%}  {duration(progress.seconds)}" + (f"  {duration(left)} left" if left else "")
        bar.add_row(
            Text.assemble(f"step {progress.step}/{progress.total_steps}", "  ", (f"{progress.phase:<10}", "cyan")),
            ProgressBar(total=1.0, completed=progress.share, complete_style="blue", finished_style="green"),
            ending,
        )
        facts = Text("   ").join(Text.assemble((label, "dim"), " ", (text, "bold")) for label, text in progress.facts())
        title, width = Text(self._title, style="bold"), max(20, self._rich.width - MARGIN)
        return Panel(Group(bar, facts), title=title, title_align="left", border_style="blue", width=width)
