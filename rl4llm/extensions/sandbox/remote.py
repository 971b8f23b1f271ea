"""Sandboxes on other machines: a slot whose programs run in ``python -m rl4llm.extensions.sandbox.serve`` there.

Each program is a line of its standard input. ``sandbox.level=package.module:Name`` names a callable that starts such a
process, once per slot. The other machine must have no secrets and no network: the canary, which runs there, must not be
able to reach this machine.
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
from rl4llm.extensions.sandbox.probe import REMOTE
from rl4llm.extensions.sandbox.program import Limits, Outcome, Program, outcome_of

GRACE_S = 30.0
STARTS_WITHIN_S = 600.0  # an image may have to be built first
LONGEST_LINE = 64 << 20


class Pipe(Protocol):
    """A process on another machine. Iterating over `output` blocks and yields pieces of its output, in any size, until
    it ends.

    Its constructor raises OSError if the process cannot be started.
    """

    output: Iterable[str]

    def send(self, line: str) -> None:
        """Write a line to its standard input. Raises OSError if that is closed."""

    def close(self) -> None:
        """End the process, and the machine that was created for it."""


ELSEWHERE: Registry[Callable[[], Pipe]] = Registry("sandbox.level")
"""Callables that start `rl4llm.extensions.sandbox.serve` on another machine."""


class RemoteSlot:
    """One process on another machine, started for the first program."""

    process = None  # it is not on this machine

    def __init__(self, start: Callable[[], Pipe]):
        self.level = REMOTE
        self._start = start
        self._pipe: Pipe | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run(self, program: Program, limits: Limits) -> tuple[Outcome, bool]:
        """Run a program once; return the outcome, and whether a retry may help."""
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
        return Outcome("infra_error", f"the sandbox on another machine failed: {reason}", level=REMOTE), True

    def close(self) -> None:
        """End the process; a later program starts a new one."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _open(self) -> Pipe:
        self._pipe, self._lines = self._start(), queue.SimpleQueue()
        streams = self._pipe, self._lines
        threading.Thread(target=_read, args=streams, name="rl4llm-sandbox", daemon=True).start()
        return self._pipe


def _read(pipe: Pipe, lines: queue.SimpleQueue[str | None]) -> None:
    """Put complete lines into a queue, and None at the end; an endless line ends it, too."""
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
