"""Nothing waits without a deadline and a name: a rank that is too long in one phase says where it is, and ends.

When one rank hangs, the others wait for it in a collective. All of them get here at about the same time, so the output
shows, for every rank, its phase and its stack: who waits, and who is waited for. A run that was said to end goes no
further, should it come back meanwhile: a rank that is done with training in that time would never be there again.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from rl4llm.core.ranks import Ranks

GRACE_S = 5.0  # for the other ranks to say where they are, before the launcher ends them all
FAILED = 1


class Watchdog:
    """Watches one rank of several while the `with` block lasts; of one process alone nobody waits for anything.

        watchdog = Watchdog(ranks, deadline_s=1800)
        with watchdog:
            with watchdog.phase("rollout"): ...
    """

    def __init__(self, ranks: Ranks, deadline_s: float):
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._phases: list[str] = []
        self._since = time.monotonic()
        self._over = threading.Event()
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        if self._ranks.size > 1:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._go_on()
        self._over.set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The deadline begins anew with every phase, and when it is over."""
        self._phases.append(name)
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._since = time.monotonic()
        self._go_on()

    def around(self, clock: Callable[[str], AbstractContextManager[Any]]) -> Callable[[str], AbstractContextManager[Any]]:
        """A clock whose phases are watched too."""

        @contextmanager
        def watched(name: str) -> Iterator[Any]:
            with self.phase(name), clock(name) as timed:
                yield timed

        return watched

    def _go_on(self) -> None:
        if self._ends.is_set():
            threading.Event().wait()  # for the end of the process

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._deadline_s / 4)):
            if time.monotonic() - self._since > self._deadline_s:
                self._ends.set()
                self._report()
                time.sleep(GRACE_S)
                os._exit(FAILED)  # the main thread may never come back from where it hangs

    def _report(self) -> None:
        where = " in ".join(reversed(self._phases)) or "start-up"
        sys.stderr.write(
            f"\nRank {self._ranks.rank} of {self._ranks.size} is in phase {where} for more than {self._deadline_s:g} s "
            "(timeout_s), so this run ends; the same command goes on from the last checkpoint. Where this rank is:\n"
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
