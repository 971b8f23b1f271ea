"""A run in a notebook: a picture below the cell that grows while it trains, and its page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.view.drawing import Curve, draw
from rl4llm.extensions.view.export import report
from rl4llm.extensions.view.run import find_runs
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime.threads import repeated
from rl4llm.tracking.console import LONG_S, Console, duration
from rl4llm.tracking.tracker import read_jsonl

REFRESH_S = 1.0
PAGE_PIXELS = 720
BASE = '<base href="about:srcdoc">'  # without it links in a frame lead to the notebook
BETWEEN = " \N{MIDDLE DOT} "


class NotebookConsole(Console):
    """Shows a run as one picture, which is replaced at most once per `REFRESH_S`; the saved notebook keeps the last one.

    It has the step, the numbers of the terminal's panel, and the curves of reward (or loss) and held-out success, also those
    from before a resume. Warnings and notes appear as text.
    """

    def __init__(self, run: RunDir, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._run = run
        self._handle: Any = None
        self._shown = ""
        self._reward: list[tuple[int, float]] = []
        self._loss: list[tuple[int, float]] = []
        self._success: list[tuple[int, float]] = []
        self._over = False
        self._drawing, self._entered = ExitStack(), False

    def __enter__(self) -> NotebookConsole:
        self._progress.start()
        with suppress(OSError, DataError):  # the tracker has reported it; earlier points are missing
            for row in read_jsonl(self._run.metrics_file):
                self._take(row["step"], row)
            for row in read_jsonl(self._run.eval_file):
                self._take_success(row["step"], row)
        self._progress.step = max((step for step, _ in (*self._reward, *self._loss)), default=0)
        self._show()
        self._drawing.enter_context(repeated(REFRESH_S, self._show, "notebook"))
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._entered:
            return
        self._over = True
        self._drawing.close()
        progress = self._progress
        progress.begin("finished" if progress.step >= progress.total_steps else "stopped")
        self._show()

    def phase(self, name: str) -> None:
        self._progress.begin(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_step(step, metrics)
        self._take(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_evaluation(step, metrics)
        self._take_success(step, metrics)

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """Show nothing: tables are for terminals and logs."""

    def _take(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, points in (("reward/mean", self._reward), ("loss", self._loss)):
            if metrics.get(name) is not None:
                points.append((step, metrics[name]))

    def _take_success(self, step: int, metrics: Mapping[str, Any]) -> None:
        if metrics.get("accuracy") is not None:
            self._success.append((step, metrics["accuracy"]))

    def _show(self) -> None:
        """Replace the picture if it changed; one thread at a time calls it."""
        lines = self._lines()
        learned = Curve("reward", tuple(self._reward)) if self._reward else Curve("loss", tuple(self._loss))
        success = Curve("held-out success", tuple(self._success), percent=True)
        picture = draw(lines, [learned, success], self._progress.total_steps)
        if picture == self._shown:
            return
        self._shown = picture
        bundle = {"image/svg+xml": picture, "text/plain": BETWEEN.join(lines)}
        if self._handle is None:
            from IPython.display import display  # noqa: PLC0415 - the kernel has it

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _lines(self) -> list[str]:
        """Return the lines above the curves: where the run is, its numbers, alerts, and who waits for whom."""
        progress = self._progress
        seconds, left = progress.phase_seconds, progress.seconds_left
        doing = progress.phase + (f" {duration(seconds)}" if seconds >= LONG_S and not self._over else "")
        times = duration(progress.seconds) + (f", {duration(left)} left" if left and not self._over else "")
        first = BETWEEN.join(
            [self._run.path.resolve().name, f"step {progress.step}/{progress.total_steps}", doing, times]
        )
        numbers = BETWEEN.join(f"{label} {text}" for label, text in progress.facts())
        alerts = ", ".join(f"{name} since step {step}" for name, step in progress.alerts.items())
        lines = [first, numbers, f"alert: {alerts}" if alerts else "", *self._waiting()]
        return [line for line in lines if line]


class NotebookPage:
    """The page of a run as it is now, in a frame of the notebook; it needs neither a server nor a network."""

    def __init__(self, run: Path, episodes: int):
        self._run = run
        page, _ = report(find_runs([str(run)]), episodes)
        self._page = page.replace("<head>", f"<head>{BASE}", 1)

    def __repr__(self) -> str:
        return f"Next: `rl4llm view {self._run}` shows this run in a browser."

    def _repr_html_(self) -> str:
        """Return a frame without access to the notebook: what a model wrote is in it."""
        style = f"width: 100%; height: {PAGE_PIXELS}px; border: 1px solid #ccc; border-radius: 6px"
        page = html.escape(self._page)
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{page}" style="{style}"></iframe>'
