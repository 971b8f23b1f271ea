"""How the two sides of `step.py` talk to their driver: a line of JSON each way, and nothing but the standard library.

A side builds its trainer, says that it is ready, and then takes one training step for each line it reads.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any


class Channel:
    """The worker's end. What libraries print goes to stderr, as stdout belongs to the driver."""

    def __init__(self) -> None:
        self._to_driver = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **values: Any) -> None:
        """Answer the driver."""
        print(json.dumps(values), file=self._to_driver, flush=True)

    def wait(self) -> bool:
        """Wait until the driver asks for a step; False when there are no more."""
        return bool(sys.stdin.readline())


class Memory:
    """Resident memory of this process, counted from when this object was made: after the model was loaded."""

    def __init__(self) -> None:
        # the high-water mark starts again at what is resident now
        Path("/proc/self/clear_refs").write_text("5")
        self._baseline_gb = self._peak_gb = _status_kib("VmRSS") * 1024 / 1e9

    def report(self, seen_gb: float = 0.0) -> dict[str, float]:
        """The high-water mark so far in GB: of the process, and above the baseline. `seen_gb` is for a side that lowers the
        mark itself: the highest that it saw."""
        self._peak_gb = max(self._peak_gb, seen_gb, _status_kib("VmHWM") * 1024 / 1e9)
        return {"peak_gb": self._peak_gb, "growth_gb": self._peak_gb - self._baseline_gb}


def reward(text: str) -> float:
    """A number from 0 to 1 that costs nothing and differs between any two completions."""
    return zlib.crc32(text.encode()) / 2**32


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
