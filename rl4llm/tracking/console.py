"""Progress on the terminal: a small live panel, or plain lines where the output is a file or a pipe."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl4llm.tracking.progress import Progress, duration

Mode = Literal["auto", "plain", "quiet", "verbose"]
REFRESH_PER_SECOND = 4
SECONDS_BETWEEN_LINES = 10.0
MARGIN = 3  # columns right of the panel: room for the "^C" that a terminal echoes, which would break the line otherwise
WIDEST = 120  # columns of the panel
NARROW = 72  # columns, below which times have a line of their own
BETWEEN = "   "
LONG_S = 5.0  # how long a phase lasts before the panel says for how long it does


class Console:
    """Shows a run: phase, step, reward, held-out success, tokens/s, time left.

        with Console(total_steps=100) as console:
            console.phase("rollout")
            console.step(1, {"reward/mean": 0.4, "tokens/s": 4100.0})

    On a terminal a panel follows the run; leaving the `with` block, however it happens, gives the terminal back, and what
    others print or log meanwhile stands above it. Elsewhere, and in the mode "plain", a line is written every `every`-th
    step and at least every ten seconds. "verbose" has a line for each step, with all numbers that people ask for; "quiet"
    shows warnings only. The cursor is never hidden: a process that is killed could not show it again.

    `waiting` says, in lines, who waits for what; it is asked often.
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
        self._progress = Progress(total_steps, now=now)
        self._quiet = mode == "quiet"
        self._verbose = mode == "verbose"
        self._title = title
        self._waiting = waiting
        self._every = 1 if self._verbose else every or max(1, total_steps // 50)
        self._file = file or sys.stdout
        self._now = now
        self._seen_phases: set[str] = set()
        self._last_line = now()
        self._rich = RichConsole(file=self._file, highlight=False, markup=False, emoji=False)
        terminal = self._file.isatty() and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self.on_terminal = terminal and mode != "plain"
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> Console:
        self._progress.start()
        if self.on_terminal and not self._quiet:
            self._start_panel()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            live, self._live = self._live, None
            for handler, stream in self._handlers:
                handler.setStream(stream)
            live.stop()

    def _start_panel(self) -> None:
        """What is printed and logged from here on goes above the panel, as far as it would have come to this terminal."""
        ours = self._file is sys.stdout
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
        self._handlers = [(handler, handler.stream) for handler in _handlers() if id(handler.stream) in before]
        for handler, stream in self._handlers:
            handler.setStream(getattr(sys, before[id(stream)]))

    def phase(self, name: str) -> None:
        """What the run is doing now. In plain output each phase is told once."""
        self._progress.begin(name)
        if name not in self._seen_phases and not self.on_terminal:
            self._line(f"phase: {name}")
        self._seen_phases.add(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished."""
        self._progress.take_step(step, metrics)
        last = step >= self._progress.total_steps
        due = step % self._every == 0 or self._now() - self._last_line >= SECONDS_BETWEEN_LINES
        if self._verbose or (not self.on_terminal and (due or last or step == 1)):
            facts = self._progress.facts() + (self._progress.details() if self._verbose else [])
            self._line("  ".join([self._where(), *(f"{label} {text}" for label, text in facts)]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out set was measured."""
        self._progress.take_evaluation(step, metrics)
        if "accuracy" in metrics:
            self.note(f"held-out success at step {step}: {metrics['accuracy']:.1%}")

    def recall(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out set was measured before this start of the run."""
        self._progress.take_evaluation(step, metrics)

    def alerts(self, open_since: Mapping[str, int]) -> None:
        """What is sick now, and since which step."""
        self._progress.alerts = dict(open_since)

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
        if self.on_terminal:
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
        """Step and bar in one line, the numbers below it; what does not fit moves to the next line."""
        progress, width = self._progress, max(20, min(self._rich.width - MARGIN, WIDEST))
        left = progress.seconds_left
        times = f"{progress.share:.0%}  {duration(progress.seconds)}" + (f"  {duration(left)} left" if left else "")
        narrow = width < NARROW
        where = Text.assemble(f"step {progress.step}/{progress.total_steps}", "  ", (f"{self._now_doing():<12}", "cyan"))
        bar = ProgressBar(total=1.0, completed=progress.share, complete_style="blue", finished_style="green")
        top = Table.grid(padding=(0, 1), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_row(where, *(["", times.partition("  ")[0]] if narrow else [bar, times]))
        shown = [Text.assemble((label, "dim"), " ", (text, "bold")) for label, text in progress.facts()]
        lines: list[RenderableType] = [top, *([Text(times.partition("  ")[2])] if narrow else []), *_rows(shown, width - 4)]
        if progress.alerts:
            named = ", ".join(f"{name} since step {step}" for name, step in progress.alerts.items())
            lines.append(Text(f"alert: {named}", style="bold yellow"))
        lines += [Text(line, style="cyan", overflow="ellipsis", no_wrap=True) for line in self._waiting()]
        title = Text(self._title, style="bold")
        title.truncate(width - 6, overflow="ellipsis")  # a longer one widens the panel
        return Panel(Group(*lines), title=title, title_align="left", border_style="blue", width=width)

    def _now_doing(self) -> str:
        seconds = self._progress.phase_seconds
        return self._progress.phase + (f" {duration(seconds)}" if seconds >= LONG_S else "")


def _rows(parts: Sequence[Text], width: int) -> list[Text]:
    """Lines of as many parts as fit, none of which is broken."""
    rows: list[list[Text]] = [[]]
    for part in parts:
        if rows[-1] and sum(one.cell_len + len(BETWEEN) for one in rows[-1]) + part.cell_len > width:
            rows.append([])
        rows[-1].append(part)
    return [Text(BETWEEN, overflow="ellipsis", no_wrap=True).join(row) for row in rows]


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """The handlers of all loggers that write to a stream, and not to a file."""
    named = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    for handler in {id(one): one for logger in (logging.root, *named) for one in logger.handlers}.values():
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            yield handler
