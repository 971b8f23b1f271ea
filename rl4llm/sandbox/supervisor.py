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
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

from rl4llm.sandbox.cell import Abandoned, BrokenTests, Cell, Ended, Place, compiled_inside, end_strays
from rl4llm.sandbox.judge import judge
from rl4llm.sandbox.levels import LEVELS
from rl4llm.sandbox.program import Limits, Outcome, Program

PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_S = 1.0


class Station:
    """Starts cells, some of them ahead of their use, and ends them."""

    def __init__(self, place: Place, limits: Limits):
        self.place = place
        self.limits = limits
        self._ahead: deque[Cell] = deque()
        self._used: list[Cell] = []

    def start(self, limits: Limits) -> Cell:
        """A new cell, which may not stand yet; raises Ended with infra_error."""
        fits = limits.disk_bytes == self.limits.disk_bytes  # all other limits are set when the program comes
        cell = self._ahead.popleft() if self._ahead and fits else Cell(self.place, limits)
        cell.limits = limits
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
    sys.set_int_max_str_digits(0)  # the digits of what a program answers are counted before they are read
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # when memory runs out, sandboxes go before the trainer
    channel = Connection(os.dup(0))
    try:
        inside = compiled_inside(settings["python"])
    except Ended as ended:
        sys.exit(ended.reason)
    packages = tuple(settings["packages"])
    place = Place(settings["level"], settings["python"], settings["uid"], packages, channel.fileno(), inside)
    station = Station(place, Limits(**settings["limits"]))
    try:
        while True:
            station.refill()
            _await_program(channel, settings["parent"])
            program, limits = pickle.loads(channel.recv_bytes())
            outcome, again = serve(station, program, limits)
            channel.send_bytes(json.dumps({"outcome": asdict(outcome), "again": again}).encode())
    except (EOFError, OSError, Abandoned):
        station.close()


def _await_program(channel: Connection, parent: int) -> None:
    """Wait for something to do; Abandoned once the trainer is gone, also where a fork of it keeps the other end open."""
    while not channel.poll(PARENT_CHECK_S):
        if os.getppid() != parent:
            raise Abandoned


def serve(station: Station, program: Program, limits: Limits) -> tuple[Outcome, bool]:
    """What came of a program, with its sandboxes gone, and whether another attempt may help."""
    started = time.monotonic()
    again = False
    try:
        outcome = judge(station, program, limits)
    except Ended as ended:
        outcome = Outcome(ended.status, ended.reason)
        again = ended.status == "infra_error" and not isinstance(ended, BrokenTests)
    try:
        station.end_used()
    except Ended as ended:
        outcome, again = Outcome(ended.status, ended.reason), True
    return replace(outcome, wall_s=time.monotonic() - started, level=station.place.level), again
