"""Metrics for Trackio, on this machine for `trackio show`, or on the server at TRACKIO_SERVER_URL."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from rl4llm.core.redact import redacted
from rl4llm.tracking.tracker import Row, Tracker

T = TypeVar("T")


class TrackioTracker(Tracker):
    """Logs to the run `run_id` of a project; a resumed run continues it. Trackio writes in a separate thread.

    The first value of a step is kept: steps that a resumed run repeats are not logged twice. `config` is stored without
    values whose name indicates a key. Trackio itself reports, once, what it cannot write.
    """

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any]):
        import trackio  # noqa: PLC0415 - an extra
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415

        self._trackio = trackio
        started = {"name": run_id, "resume": "allow", "config": redacted(config)}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}  # rl4llm logs resources itself
        self._run = _guarded(lambda: _silent(lambda: trackio.init(project, **started, **quiet)))
        last = _guarded(lambda: SQLiteStorage.get_max_step_for_run(project, run_id, run_id=self._run.id))
        self._last = -1 if last is None else last

    def __str__(self) -> str:
        return "Trackio"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, dict(metrics))

    def picture(self, step: int, name: str, file: Path) -> None:
        self._log(step, {name: self._trackio.Image(str(file))})

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._log(step, {name: self._trackio.Table(list(rows[0]), [list(row.values()) for row in rows])})

    def close(self) -> None:
        _guarded(lambda: _silent(self._trackio.finish))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step > self._last:  # last step before a resume
            _guarded(lambda: self._run.log(values, step=step))


def open_tracker(
    directory: Path, project: str, run_id: str, config: Mapping[str, Any], warn: Callable[[str], None]
) -> Tracker:
    """Log to Trackio, which has its own files and prints its own warnings."""
    return TrackioTracker(project, run_id, config)


def _silent(call: Callable[[], T]) -> T:
    """Return the result of a call without its output, since Trackio prints announcements."""
    with redirect_stdout(io.StringIO()):
        return call()


def _guarded(call: Callable[[], T]) -> T:
    try:
        return call()
    except (ValueError, RuntimeError, sqlite3.Error) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
