"""The process that runs programs in sandboxes and judges them, one at a time; nothing of a program outlives it.

It is between the trainer and the sandboxes. It has the expected answers, which never enter the sandbox of a candidate.
It also adopts and reaps the processes of a killed sandbox, which process 1 may not do in a container. It imports only
the standard library and this package.
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

from rl4llm.extensions.sandbox.cell import (
    Abandoned,
    BrokenTests,
    Cell,
    CellSite,
    Ended,
    compiled_inside,
    end_strays,
)
from rl4llm.extensions.sandbox.judge import judge
from rl4llm.extensions.sandbox.levels import LEVELS
from rl4llm.extensions.sandbox.program import Limits, Outcome, Program

PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_S = 1.0


class Station:
    """Starts cells, some of them in advance, and ends them."""

    def __init__(self, place: CellSite, limits: Limits):
        self.place = place
        self.limits = limits
        self._ahead: deque[Cell] = deque()
        self._used: list[Cell] = []

    def start(self, limits: Limits) -> Cell:
        """Return a new cell, which may not be ready yet. Raises Ended with infra_error."""
        fits = limits.disk_bytes == self.limits.disk_bytes  # all other limits are set with the program
        cell = self._ahead.popleft() if self._ahead and fits else Cell(self.place, limits)
        cell.limits = limits
        self._used.append(cell)
        return cell

    def end(self, cell: Cell) -> None:
        """End one cell and everything it left."""
        self._used.remove(cell)
        try:
            cell.end()
        finally:
            end_strays({running.process.pid for running in (*self._ahead, *self._used)})

    def end_used(self) -> None:
        for cell in list(self._used):
            self.end(cell)

    def refill(self) -> None:
        """Start cells in advance, for programs with the usual limits."""
        with contextlib.suppress(Ended):  # the next program reports the error
            while len(self._ahead) < LEVELS[self.place.level].prefork:
                self._ahead.append(Cell(self.place, self.limits))

    def close(self) -> None:
        self._used += self._ahead
        self._ahead.clear()
        with contextlib.suppress(Ended):
            self.end_used()


def main() -> None:
    """Serve programs until the trainer disconnects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    sys.set_int_max_str_digits(0)  # `wire` limits the digits of a program's answers before parsing them
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # when memory runs out, sandboxes are killed before the trainer
    channel = Connection(os.dup(0))
    walls, usual, parent = pickle.loads(channel.recv_bytes())
    inside = compiled_inside(walls["python"])
    station = Station(CellSite(owner=channel.fileno(), inside=inside, **walls), usual)
    try:
        while True:
            station.refill()
            while not channel.poll(PARENT_CHECK_S):
                if os.getppid() != parent:  # even if a fork of the trainer keeps the connection open
                    raise Abandoned
            program, limits = pickle.loads(channel.recv_bytes())
            outcome, again = serve(station, program, limits)
            channel.send_bytes(json.dumps({"outcome": asdict(outcome), "again": again}).encode())
    except (EOFError, OSError, Abandoned):
        station.close()


def serve(station: Station, program: Program, limits: Limits) -> tuple[Outcome, bool]:
    """Return the outcome of a program after its sandboxes have ended, and whether a retry may help."""
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
