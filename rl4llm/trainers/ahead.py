"""Play the episodes of the next step while this one trains (one-step off-policy)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rl4llm.runtime.runner import Runner

T = TypeVar("T")
END_S = 30.0  # until cancelled episodes must have ended


class Ahead(Generic[T]):
    """At most one rollout, in a thread. From `start` to `wait` nothing else should use its runner.

    The thread lives until the end, since processes that it starts, such as tool servers, die with it.
    `cursor` is the state of the prompts before those of the current rollout.
    """

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}
        self._future: Future[T] | None = None
        self._jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_play_all, args=(self._jobs,), name="rollout ahead", daemon=True
        )

    @property
    def under_way(self) -> bool:
        """Return whether a rollout was started and not yet taken; it is equal on all ranks."""
        return self._future is not None

    def start(self, play: Callable[[], T], cursor: dict[str, Any]) -> None:
        """Begin to play."""
        self.cursor = cursor
        if not self._thread.is_alive():
            self._thread.start()
        self._future = Future()
        self._jobs.put((self._future, play))

    def wait(self) -> None:
        """Return when the rollout has ended, even with an error."""
        if self._future is not None:
            wait([self._future])

    def take(self) -> T:
        """Return the result of the rollout, or raise its error."""
        future, self._future = self._future, None
        assert future is not None  # it was started
        return future.result()

    def close(self, runner: Runner) -> bool:
        """Cancel the current rollout; return False if it does not end."""
        if not self._thread.is_alive():
            return True
        if self._future is not None and not self._future.done():
            runner.cancel()
        self._jobs.put(None)
        self._thread.join(END_S)
        return not self._thread.is_alive()


def _play_all(jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, play = job
        try:
            future.set_result(play())
        except BaseException as error:  # noqa: BLE001 - `take` raises it again
            future.set_exception(error)
        del job, future, play  # frees the result before the next one
