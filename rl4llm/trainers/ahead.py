"""The episodes of the next step, played while this one trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

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

    `under_way` from the start until it is taken, on all ranks alike.
    """

    def __init__(self) -> None:
        self._future: Future[Played] | None = None

    @property
    def under_way(self) -> bool:
        return self._future is not None

    def start(self, play: Callable[[], Played]) -> None:
        """Begin to play."""
        self._future = Future()
        threading.Thread(target=_fill, args=(self._future, play), name="rollout ahead", daemon=True).start()

    def wait(self) -> None:
        """Return when all is played, or when that failed."""
        if self._future is not None:
            wait([self._future])

    def take(self) -> Played:
        """What was played; raises what playing raised."""
        future, self._future = self._future, None
        return future.result()

    def cancel(self, runner: asyncio.Runner) -> bool:
        """Give up what is under way; False when it does not end."""
        if self._future is None:
            return True
        future, self._future = self._future, None
        loop = runner.get_loop()
        loop.call_soon_threadsafe(_cancel_all, loop, future)
        return not wait([future], END_S).not_done


def _cancel_all(loop: asyncio.AbstractEventLoop, future: Future[Played]) -> None:
    if not future.done():  # else what the loop runs by now is something else
        for task in asyncio.all_tasks(loop):
            task.cancel()


def _fill(future: Future[Played], play: Callable[[], Played]) -> None:
    try:
        future.set_result(play())
    except BaseException as error:  # noqa: BLE001 - raised again where it is taken
        future.set_exception(error)
