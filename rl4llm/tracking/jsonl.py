"""Metrics as JSON lines: one object per `log`, readable while the run writes and after it was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.tracking.tracker import Tracker


class JsonlTracker(Tracker):
    """Appends ``{"step": 12, "reward/mean": 0.5, ...}``; a number that is not finite becomes null.

    `resume_step` is the step that training goes on from (-1: from the start): later lines and a torn last one are cut off
    first, so that no step is in the file twice.
    """

    def __init__(self, path: Path, resume_step: int = -1):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
        self._size = _size_through(path, resume_step)
        self._file.truncate(self._size)

    def __str__(self) -> str:
        return self.path.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append({"step": step, **{name: _finite(value) for name, value in metrics.items()}})

    def append(self, row: Mapping[str, Any]) -> None:
        """Append any row with a step; when it does not fit on the disk (OSError), no part of it stays in the file."""
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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a torn last line, which a killed run leaves, is left out. No file is no rows.

    Raises DataError with file and line for anything else that is not JSON.
    """
    return list(_rows(path)) if path.exists() else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise DataError(f"{path}:{number} is not a JSON object: {line[:80].decode(errors='replace').strip()!r}.")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _size_through(path: Path, resume_step: int) -> int:
    """Bytes of the whole lines before the first one of a later step."""
    size = 0
    with open(path, "rb") as file:
        for line in file:
            row = _parse(line)
            later = row is not None and row.get("step", -1) > resume_step
            if later or not line.endswith(b"\n"):
                break
            size += len(line)
    return size


def _finite(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None
