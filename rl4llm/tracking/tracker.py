"""Trackers receive the metrics of a run. A failing tracker is reported once and never stops training."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError, DataError, RunDirError
from rl4llm.core.registry import Registry
from rl4llm.runs.run_dir import write_atomically

Row = Mapping[str, str | float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker knows of its run: `resume_step` is the last step before training resumes (-1: none)."""

    directory: Path
    resume_step: int = -1
    project: str = "rl4llm"
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    warn: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class TimedPhase:
    """When a phase ran, in seconds since 1970."""

    name: str
    start: float
    end: float


class Tracker(ABC):
    """Takes what a run logs, in the order of steps. Its methods may raise OSError, see `Tolerant`; none waits for a network.

    By default a tracker ignores phases, pictures and tables.
    """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; those of its evaluation, whose names begin with "eval/", come in a second call."""

    def phases(self, step: int, phases: Sequence[TimedPhase]) -> None:
        """Record the phases that ended since the last call, after the metrics of the step were logged."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Store a PNG; it replaces an earlier one of this name."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Store rows with equal columns."""

    def close(self) -> None:
        """Write pending output."""


class JsonlTracker(Tracker):
    """Appends ``{"step": 12, "reward/mean": 0.5, ...}``; a number that is not finite becomes null.

    `resume_step` is the last step before training resumes (-1: none). Later lines are removed first, so that no step is in
    the file twice. Lines of earlier steps that are damaged, as after a power failure, move to the file NAME.damaged.
    """

    def __init__(self, path: Path, resume_step: int = -1, warn: Callable[[str], None] = lambda text: None):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        rows, damaged = self._resumed(resume_step)
        if damaged:
            with open(f"{path}.damaged", "ab") as aside:
                aside.writelines(line.rstrip(b"\n") + b"\n" for line in damaged)
            write_atomically(path, b"".join(rows))
            warn(
                f"{self} had {len(damaged)} damaged lines, which are now in {self}.damaged: it lacks these steps."
            )
        self._size = sum(map(len, rows))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
        self._file.truncate(self._size)

    def _resumed(self, resume_step: int) -> tuple[list[bytes], list[bytes]]:
        """Return the lines up to a step, and the damaged ones among them; one of a step that comes again is no loss."""
        rows: list[bytes] = []
        damaged: list[bytes] = []
        step = -1
        for line in self.path.read_bytes().splitlines(keepends=True):
            named = re.search(rb'"step": (-?\d+)[,}]', line)
            step = int(named[1]) if named else step
            if step > resume_step:
                break
            if named and line.endswith(b"\n") and _parse(line):
                rows.append(line)
            elif named or line.endswith(b"\n") or step < resume_step:
                damaged.append(line)
        return rows, damaged

    def __str__(self) -> str:
        return self.path.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.append({"step": step, **finite})

    def append(self, row: Mapping[str, Any]) -> None:
        """Append any row with a step; if the disk is full (OSError), no part of it stays in the file."""
        line = memoryview(json.dumps(row).encode() + b"\n")
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry(
    "tracking",
    table={"tensorboard": "rl4llm.tracking.tensorboard:TensorBoardTracker"},
    group="rl4llm.trackers",
)
"""Trackers by their key under `tracking`, which is also their extra. The module of each imports its package."""


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError when a tracker, or the package that it needs, is not installed."""
    for name in names:
        try:
            TRACKERS[name]
        except ImportError as error:
            raise ConfigError(f"tracking.{name}: {error}. Next: pip install 'rl4llm[{name}]'.") from error


class Tolerant:
    """Lets writing of logs fail: it reports the first failure of each name to `warn`, and only counts the later ones.

    with tolerant("metrics.jsonl"):
        tracker.log(step, metrics)
    """

    def __init__(self, warn: Callable[[str], None]):
        self._warn = warn
        self.failures: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one write under this name."""
        try:
            yield
        except (OSError, RunDirError, DataError) as error:
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                self._warn(
                    f"{name} cannot be written ({error}). Training continues; this log stays incomplete."
                )


class Trackers(Tracker):
    """Several trackers as one; a failing one stops neither the others nor training."""

    def __init__(self, trackers: Sequence[Tracker], tolerant: Tolerant):
        self._trackers = tuple(trackers)
        self._tolerant = tolerant

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def phases(self, step: int, phases: Sequence[TimedPhase]) -> None:
        self._each(lambda tracker: tracker.phases(step, phases))

    def picture(self, step: int, name: str, file: Path) -> None:
        self._each(lambda tracker: tracker.picture(step, name, file))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._each(lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            with self._tolerant(str(tracker)):
                tell(tracker)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, without a torn last line of a killed run; a missing file has no rows.

    Raise DataError with file and line for anything else that is not JSON.
    """
    if not path.exists():
        return []
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                rows.append(row)
            elif line.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number} is not a JSON object: {line[:80].decode(errors='replace').strip()!r}."
                )
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def rounded(value: float, digits: int = 4) -> str:
    """Return a number with a few significant digits, and all of those before the point."""
    return f"{value:.0f}" if 10 ** (digits - 1) <= abs(value) < 1e15 else f"{value:.{digits}g}"
