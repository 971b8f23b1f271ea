"""How a run ends early: at the next good moment after a signal, or because a rank is stuck.

Nothing waits without a deadline and a name: a rank that spends too long in one phase reports where it is, and exits.

When one rank hangs, the others wait for it in a collective. All of them reach their deadline at about the same time, so the
output shows the phase and the stack of every rank. Once that report is written, a rank that comes back does not continue,
since the others are about to exit.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from rl4llm.runtime.ranks import Ranks

GRACE_S = 5.0  # for the other ranks to report where they are, before the launcher ends them all
FAILED = 1


class Watchdog:
    """Watches one of several ranks while the `with` block lasts; a single process is not watched.

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
            self._hold_if_ending()
        self._over.set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Restart the deadline at the beginning and at the end of a phase."""
        self._phases.append(name)
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._since = time.monotonic()
        self._hold_if_ending()

    def around(
        self, clock: Callable[[str], AbstractContextManager[Any]]
    ) -> Callable[[str], AbstractContextManager[Any]]:
        """Return a clock whose phases are watched too."""

        @contextmanager
        def watched(name: str) -> Iterator[Any]:
            with self.phase(name), clock(name) as timed:
                yield timed

        return watched

    def _hold_if_ending(self) -> None:
        if self._ends.is_set():
            threading.Event().wait()  # until the process ends

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
            f"\nRank {self._ranks.rank} of {self._ranks.size} has been in phase {where} for more than "
            f"{self._deadline_s:g} s (timeout_s), so this run ends; the same command resumes from the last checkpoint. "
            "Stack of this rank:\n"
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()


@contextmanager
def stop_on_signals(requested: threading.Event, warn: Callable[[str], None]) -> Iterator[None]:
    """Set `requested` and pass the signal's name to `warn` on the first Ctrl-C, SIGTERM or SIGHUP inside.

    The next one raises KeyboardInterrupt, except SIGHUP: a terminal that closes sends it more than once.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield
        return

    def request_stop(number: int, frame: Any) -> None:
        if requested.is_set():
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        requested.set()
        warn(signal.Signals(number).name)

    with stop_signals(request_stop):
        yield


@contextmanager
def stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `handler` take Ctrl-C, SIGTERM and the SIGHUP of a terminal that closes, unless nohup switched that off.

    After SIGHUP, output that went to a terminal is dropped, since writing to it would fail.
    """
    terminals = [output for output in (1, 2) if os.isatty(output)]

    def hang_up(number: int, frame: Any) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in terminals:
            os.dup2(nowhere, output)
        os.close(nowhere)
        handler(number, frame)

    handlers = {signal.SIGINT: handler, signal.SIGTERM: handler}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = hang_up
    before = {number: signal.signal(number, action) for number, action in handlers.items()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
