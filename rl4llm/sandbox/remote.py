"""Sandboxes on other machines: a slot whose programs are run by ``python -m rl4llm.sandbox.serve`` there, a line for each.

``sandbox.level=package.module:Name`` names what starts such a process and is called once for each slot. The other machine is
to hold nothing worth reading, and no network: the canary, which looks for this machine from there, must not find it.
"""

from __future__ import annotations

import base64
import json
import pickle
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from rl4llm.core.registry import Registry
from rl4llm.sandbox.probe import REMOTE
from rl4llm.sandbox.program import Limits, Outcome, Program, outcome_of

GRACE_S = 30.0
STARTS_WITHIN_S = 600.0  # an image may have to be built first
LONGEST_LINE = 64 << 20


class Pipe(Protocol):
    """A process elsewhere. `output` are pieces of what it writes, in any size, until it ends; asking for one blocks.

    Whatever makes it raises OSError where that does not work.
    """

    output: Iterable[str]

    def send(self, line: str) -> None:
        """Write a line to its standard input; OSError where that is closed."""

    def close(self) -> None:
        """End the process, and the machine that was made for it."""


ELSEWHERE: Registry[Callable[[], Pipe]] = Registry("sandbox.level")
"""What starts `rl4llm.sandbox.serve` on another machine."""


class RemoteSlot:
    """One process elsewhere, started when there is something to run."""

    process = None  # none of this machine

    def __init__(self, start: Callable[[], Pipe]):
        self.level = REMOTE
        self._start = start
        self._pipe: Pipe | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run(self, program: Program, limits: Limits) -> tuple[Outcome, bool]:
        """One attempt at a program, and whether another one may help."""
        wait_s = limits.total_s + GRACE_S
        try:
            if (pipe := self._pipe) is None:
                pipe = self._open()
                wait_s += STARTS_WITHIN_S
            pipe.send(base64.b64encode(pickle.dumps((program, limits))).decode())
            line = self._lines.get(timeout=wait_s)
            if line is None:
                raise EOFError("it ended")
            return replace(outcome_of(json.loads(line)), level=REMOTE), False
        except queue.Empty:
            reason = f"no answer after {wait_s:g} s"
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
        self.close()
        return Outcome("infra_error", f"the sandbox elsewhere failed: {reason}", level=REMOTE), True

    def close(self) -> None:
        """End the process; a later program starts another."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _open(self) -> Pipe:
        self._pipe, self._lines = self._start(), queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(self._pipe, self._lines), name="rl4llm-sandbox", daemon=True)
        reader.start()
        return self._pipe


def _read(pipe: Pipe, lines: queue.SimpleQueue[str | None]) -> None:
    """Put whole lines into a queue, and None at the end; a line without end is one."""
    rest = ""
    try:
        for piece in pipe.output:
            *whole, rest = (rest + piece).split("\n")
            for line in whole:
                lines.put(line)
            if len(rest) > LONGEST_LINE:
                break
    finally:
        lines.put(None)
