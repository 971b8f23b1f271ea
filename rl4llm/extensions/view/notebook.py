"""A run in a notebook: numbers and a picture below the cell that follow it while it trains, and its page."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.view.export import report
from rl4llm.extensions.view.run import find_runs
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime.threads import repeated
from rl4llm.tracking.console import Console, duration
from rl4llm.tracking.curve import picture
from rl4llm.tracking.tracker import read_jsonl

REFRESH_S = 5.0  # drawing takes a tenth of a second
PAGE_PIXELS = 720
BASE = '<base href="about:srcdoc">'  # without it links in a frame lead to the notebook
BETWEEN = " \N{MIDDLE DOT} "


class NotebookConsole(Console):
    """Shows a run as its numbers above its curves, which are replaced at most once per `REFRESH_S`.

    The saved notebook keeps the last ones. They include those from before a resume. Warnings and notes appear as text.
    """

    def __init__(self, run: RunDir, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._run = run
        self._handle: Any = None
        self._phase = "starting"
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: list[Mapping[str, Any]] = []
        self._drawn, self._image = (0, 0), ""
        self._drawing = ExitStack()

    def __enter__(self) -> NotebookConsole:
        self._progress.start()
        with suppress(OSError, DataError):  # the tracker has reported it; earlier points are missing
            self._rows += read_jsonl(self._run.metrics_file)
            self._evaluations += read_jsonl(self._run.eval_file)
        self._progress.step = max((row["step"] for row in self._rows), default=0)
        self._show()
        self._drawing.enter_context(repeated(REFRESH_S, self._show, "notebook"))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle is None:
            return
        self._drawing.close()
        progress = self._progress
        self._phase = "finished" if progress.step >= progress.total_steps else "stopped"
        self._show()

    def phase(self, name: str) -> None:
        self._phase = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_step(step, metrics)
        self._rows.append({"step": step, **metrics})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_evaluation(step, metrics)
        self._evaluations.append({"step": step, **metrics})

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """Show nothing: tables are for terminals and logs."""

    def _show(self) -> None:
        """Replace what the cell shows; one thread at a time calls it."""
        rows, evaluations = list(self._rows), list(self._evaluations)
        if self._drawn != (len(rows), len(evaluations)):
            self._drawn = len(rows), len(evaluations)
            png = base64.b64encode(picture(rows, evaluations, self._run.path.resolve().name)).decode()
            self._image = f'<img alt="curves" width="720" src="data:image/png;base64,{png}">' if png else ""
        lines = self._lines()
        text = html.escape("\n".join(lines))
        bundle = {"text/html": f"<pre>{text}</pre>{self._image}", "text/plain": BETWEEN.join(lines)}
        if self._handle is None:
            from IPython.display import display  # noqa: PLC0415 - the kernel has it

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _lines(self) -> list[str]:
        """Return the lines above the curves: where the run is, its numbers, and alerts."""
        progress = self._progress
        times = duration(progress.seconds)
        if progress.seconds_left:
            times += f", {duration(progress.seconds_left)} left"
        where = f"step {progress.step}/{progress.total_steps}"
        heading = BETWEEN.join([self._run.path.resolve().name, where, self._phase, times])
        numbers = BETWEEN.join(f"{label} {text}" for label, text in progress.facts())
        alerts = [f"alert: {name} since step {step}" for name, step in progress.alerts.items()]
        return [line for line in (heading, numbers, *alerts) if line]


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
