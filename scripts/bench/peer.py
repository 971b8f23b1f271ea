"""What the benchmarks share, with nothing but the standard library: options, sides that take turns, and spreads of numbers.

A side in another environment is a process that a driver talks to: a line of JSON each way. It builds what it measures, says
that it is ready, and then does its work once for each line it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

DEADLINE_S = 900  # for a process to start, or to do its work once
Taken = TypeVar("Taken")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the text of a script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_turns(
    sides: Mapping[str, Callable[[], Taken]], rounds: int, warm_up: int = 1
) -> dict[str, list[Taken]]:
    """Run each side once in each round; return what each gave, without the rounds that warm up."""
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, run in sides.items():
            found = run()
            if number >= warm_up:
                taken[name].append(found)
    return taken


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio of each pair."""
    return [one / other for one, other in zip(over, under, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, the least and the most.

    >>> spread([1.0, 3.0, 2.0], ".1f")
    '2.0 (1.0 to 3.0)'
    """
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


class Peer:
    """The driver's end: the process of a side."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name, self._log = name, log
        pipe = subprocess.PIPE
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment
            )
        self.versions = self._answer()["versions"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self) -> dict[str, Any]:
        """Have it do its work once; return what it measured."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        problem = f"did not answer within {DEADLINE_S} s"
        if select.select([self._process.stdout], [], [], DEADLINE_S)[0]:
            if line := self._process.stdout.readline():
                return json.loads(line)
            problem = f"ended with {self._process.wait()}"
        raise SystemExit(f"{self.name} {problem}:\n{self._log.read_text()[-4000:]}")


class Channel:
    """The side's end. What libraries print goes to stderr, as stdout belongs to the driver."""

    def __init__(self) -> None:
        self._to_driver = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **values: Any) -> None:
        """Answer the driver."""
        print(json.dumps(values), file=self._to_driver, flush=True)

    def wait(self) -> bool:
        """Wait until the driver asks for work; False when there is no more."""
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
