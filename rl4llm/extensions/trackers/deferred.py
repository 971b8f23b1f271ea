"""A tracker whose server may be slow or unavailable, without making training wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl4llm.tracking.tracker import Row, Tracker

MOST_WAITING = 20_000  # about a day of steps of five seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
CLOSE_S = 60.0  # creating MLflow's first database takes half a minute on a busy machine


class Deferred(Tracker):
    """Passes log entries to a tracker in a separate thread, which also opens it.

    An entry that fails with a ConnectionError is retried, and all later entries wait for it: when the server is back,
    nothing is missing. An entry that fails with another OSError is dropped. Both are reported through `warn` once. When
    the run closes, waiting entries have `close_s` seconds, and one more attempt.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        warn: Callable[[str], None],
        close_s: float = CLOSE_S,
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
            self._warn(f"{self._name}: {lost} entries were not sent; metrics.jsonl has all of them.")

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
                self._tell("cannot be reached", f"{error}", "Retrying; entries are kept until then.")
                pause = min(max(FIRST_PAUSE_S, 2 * pause), LONGEST_PAUSE_S)
                if self._closing:
                    return
                continue
            except OSError as error:
                self._tell("refused an entry", f"{error}", "Entries that it refuses are dropped.")
                self._lost += 1
            pause = 0.0
            with self._changed:
                if self._waiting and self._waiting[0] is call:
                    self._waiting.popleft()

    def _next(self, pause: float) -> Callable[[Tracker], None] | None:
        """Return the next entry after a pause; None when all are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause)
            self._changed.wait_for(lambda: self._closing or self._waiting)
            return self._waiting[0] if self._waiting else None

    def _tell(self, what: str, why: str, then: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(f"{self._name} {what} ({why}). Training continues. {then}")
