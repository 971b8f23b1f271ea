"""The process that runs programs in sandboxes and judges them, one at a time; nothing a program leaves outlives it.

It stands between the trainer and the sandboxes: it holds the expected answers, which enter no sandbox of a candidate, and
it takes over and reaps what a killed sandbox leaves, which nobody else may do where process 1 does not. It imports nothing
but the standard library and this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
import time
from collections import deque
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from rl4llm.sandbox.cell import Abandoned, Cell, Ended, Place, compiled_inside, end_strays
from rl4llm.sandbox.judge import judge
from rl4llm.sandbox.levels import LEVELS
from rl4llm.sandbox.program import Limits, Outcome, Program

PR_SET_CHILD_SUBREAPER = 36


class Station:
    """Starts cells, some of them ahead of their use, and ends them."""

    def __init__(self, place: Place, limits: Limits):
        self.place = place
        self.limits = limits
        self._ahead: deque[Cell] = deque()
        self._used: list[Cell] = []

    def start(self, limits: Limits) -> Cell:
        """A new cell, which may not stand yet; raises Ended with infra_error."""
        cell = self._ahead.popleft() if self._ahead and limits == self.limits else Cell(self.place, limits)
        self._used.append(cell)
        return cell

    def end(self, cell: Cell) -> None:
        """End one cell and all that it left."""
        self._used.remove(cell)
        try:
            cell.end()
        finally:
            end_strays({other.process.pid for other in (*self._ahead, *self._used)})

    def end_used(self) -> None:
        for cell in list(self._used):
            self.end(cell)

    def refill(self) -> None:
        """Start cells ahead, for programs with the usual limits."""
        with contextlib.suppress(Ended):  # the next program says why
            while len(self._ahead) < LEVELS[self.place.level].prefork:
                self._ahead.append(Cell(self.place, self.limits))

    def close(self) -> None:
        self._used += self._ahead
        self._ahead.clear()
        with contextlib.suppress(Ended):
            self.end_used()


def main() -> None:
    """Serve programs until the trainer is gone."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # when memory runs out, sandboxes go before the trainer
    channel = Connection(os.dup(0))
    inside = compiled_inside(settings["python"])
    packages = tuple(settings["packages"])
    place = Place(settings["level"], settings["python"], settings["uid"], packages, channel.fileno(), inside)
    station = Station(place, Limits(**settings["limits"]))
    try:
        while True:
            station.refill()
            program, limits = pickle.loads(channel.recv_bytes())
            channel.send_bytes(json.dumps(asdict(serve(station, program, limits))).encode())
    except (EOFError, OSError, Abandoned):
        station.close()


def serve(station: Station, program: Program, limits: Limits) -> Outcome:
    """What came of a program, with its sandboxes gone."""
    started = time.monotonic()
    try:
        outcome = judge(station, program, limits)
    except Ended as ended:
        outcome = Outcome(ended.status, ended.reason)
    try:
        station.end_used()
    except Ended as ended:
        outcome = Outcome(ended.status, ended.reason)
    return _shown(outcome, time.monotonic() - started, station.place.level)


def _shown(outcome: Outcome, wall_s: float, level: str) -> Outcome:
    values: dict[str, Any] = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return Outcome(**{**values, "wall_s": wall_s, "level": level})
