"""The episodes of the next step, played while this one trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue

from rl4llm.envs.rollout import RolloutResult

END_S = 30.0  # for episodes that are cancelled to be gone


@dataclass(frozen=True, slots=True)
class Played:
    """The episodes of some prompts, and the version of the weights that they were played with."""

    rows: list[int]
    result: RolloutResult
    version: int


class Ahead:
    """At most one rollout, in a thread of its own. From `start` to `wait` nobody else may use its event loop.

    The thread is there until the end: processes that are started in one, such as servers of tools, die with it.
    """

    def __init__(self) -> None:
        self._future: Future[Played] | None = None
        self._jobs: SimpleQueue[tuple[Future[Played], Callable[[], Played]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_play_all, args=(self._jobs,), name="rollout ahead", daemon=True)

    @property
    def under_way(self) -> bool:
        """From the start until it is taken, on all ranks alike."""
        return self._future is not None

    def start(self, play: Callable[[], Played]) -> None:
        """Begin to play."""
        if not self._thread.is_alive():
            self._thread.start()
        self._future = Future()
        self._jobs.put((self._future, play))

    def wait(self) -> None:
        """Return when all is played, or when that failed."""
        if self._future is not None:
            wait([self._future])

    def take(self) -> Played:
        """What was played; raises what playing raised."""
        future, self._future = self._future, None
        assert future is not None  # it was started
        return future.result()

    def close(self, runner: asyncio.Runner) -> bool:
        """Give up what is under way; False when it does not end."""
        if not self._thread.is_alive():
            return True
        if self._future is not None:
            loop = runner.get_loop()
            loop.call_soon_threadsafe(_cancel_all, loop, self._future)
        self._jobs.put(None)
        self._thread.join(END_S)
        return not self._thread.is_alive()


def _cancel_all(loop: asyncio.AbstractEventLoop, future: Future[Played]) -> None:
    if not future.done():  # else what the loop runs by now is something else
        for task in asyncio.all_tasks(loop):
            task.cancel()


def _play_all(jobs: SimpleQueue[tuple[Future[Played], Callable[[], Played]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, play = job
        try:
            future.set_result(play())
        except BaseException as error:  # noqa: BLE001 - raised again where it is taken
            future.set_exception(error)
        del job, future, play  # what was played is not kept until the next one
