"""A tracker whose server may be slow or away: training never waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl4llm.tracking.tracker import Row, Tracker

MOST_WAITING = 20_000  # about a day of steps of five seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
CLOSE_S = 60.0  # a first database of MLflow takes half a minute on a busy machine


class Deferred(Tracker):
    """Hands what is logged to a tracker in a thread of its own, which also opens it.

    What fails with a ConnectionError waits and is tried again, and all behind it with it: when the server is back, nothing
    is missing. What fails with another OSError is let go. Both are told by `warn` once. When the run closes, what waits has
    `close_s` seconds, and one more attempt.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], warn: Callable[[str], None], close_s: float = CLOSE_S
    ):
        self._name = name
        self._open = open_tracker
        self._warn = warn
        self._close_s = close_s
        self._waiting: deque[Callable[[Tracker], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._lost = 0
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self._name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = dict(metrics)
        self._put(lambda tracker: tracker.log(step, metrics))

    def picture(self, step: int, name: str, file: Path) -> None:
        self._put(lambda tracker: tracker.picture(step, name, file))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        rows = list(rows)
        self._put(lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        self._put(lambda tracker: tracker.close())
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(self._close_s)
        lost = self._lost + len(self._waiting)
        if lost:
            self._warn(f"{self._name}: {lost} entries were not sent; {self._name} lacks them, metrics.jsonl has them all.")

    def _put(self, call: Callable[[Tracker], None]) -> None:
        with self._changed:
            if len(self._waiting) == MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(call)
            self._changed.notify()

    def _work(self) -> None:
        tracker, pause = None, 0.0
        while (call := self._next(pause)) is not None:
            try:
                tracker = tracker or self._open()
                call(tracker)
            except ConnectionError as error:
                self._tell("cannot be reached", f"{error}", "It is tried again, and nothing is lost until then.")
                pause = min(max(FIRST_PAUSE_S, 2 * pause), LONGEST_PAUSE_S)
                if self._closing:
                    return
                continue
            except OSError as error:
                self._tell("refused", f"{error}", "What it refuses stays missing there.")
                self._lost += 1
            pause = 0.0
            with self._changed:
                if self._waiting and self._waiting[0] is call:
                    self._waiting.popleft()

    def _next(self, pause: float) -> Callable[[Tracker], None] | None:
        """What is next, after a pause; None when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause)
            self._changed.wait_for(lambda: self._closing or self._waiting)
            return self._waiting[0] if self._waiting else None

    def _tell(self, what: str, why: str, then: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(f"{self._name} {what} ({why}). Training goes on. {then}")
