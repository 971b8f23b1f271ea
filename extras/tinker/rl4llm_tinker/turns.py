"""One thread computes everything: requests of each model in their order, clients by turns, and samples in between."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from rl4llm.core.errors import EngineError
from rl4llm.inference.local import MAX_ROWS

Job = Callable[[], bytes]
"""Computes the body of an answer."""

Draw = Callable[[], Coroutine[Any, Any, bytes]]
"""Computes it beside other samples."""


class JobWorker:
    """Runs jobs and samples in a thread with its own event loop; everything else may be called from any thread.

    A job holds up the samples that are being drawn. After each, samples get as long as it took, while there are any.
    Clients take turns with jobs and with samples, so a client that queues many delays another by one of them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._queues: dict[str, deque[tuple[Job, Future[bytes]]]] = {}  # by session
        self._asked: dict[str, deque[tuple[int, Draw, Future[bytes]]]] = {}  # by session
        self._samples: dict[asyncio.Task[bytes], int] = {}  # those being drawn, with their sequences
        self._came = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rl4llm-tinker", daemon=True)
        self._thread.start()

    def put(self, session_id: str, job: Job, outcome: Future[bytes]) -> None:
        """Queue a job behind the others of its client; `outcome` gets its answer."""
        self._loop.call_soon_threadsafe(self._add, session_id, job, outcome)

    def sample(self, session_id: str, sequences: int, draw: Draw, outcome: Future[bytes]) -> None:
        """Queue the drawing of samples with `sequences` in all; `outcome` gets the answer."""
        self._loop.call_soon_threadsafe(self._ask, session_id, (sequences, draw, outcome))

    def drop(self, session_id: str) -> None:
        """Forget the samples that a client has asked for and that are not being drawn; their outcomes stay open."""
        self._loop.call_soon_threadsafe(self._asked.pop, session_id, None)

    def close(self) -> None:
        """End the thread; what is queued is never computed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _add(self, session_id: str, job: Job, outcome: Future[bytes]) -> None:
        self._queues.setdefault(session_id, deque()).append((job, outcome))
        self._came.set()

    def _ask(self, session_id: str, asked: tuple[int, Draw, Future[bytes]]) -> None:
        self._asked.setdefault(session_id, deque()).append(asked)
        self._draw()

    def _draw(self) -> None:
        """Start requests for samples, of each client in turn, while the engine has places for them."""
        while self._asked and sum(self._samples.values()) < MAX_ROWS:
            session_id = next(iter(self._asked))
            queue = self._asked.pop(session_id)
            sequences, draw, outcome = queue.popleft()
            if queue:
                self._asked[session_id] = queue  # behind the other clients
            task = self._loop.create_task(draw())
            self._samples[task] = sequences
            task.add_done_callback(partial(self._drawn, outcome))

    def _drawn(self, outcome: Future[bytes], task: asyncio.Task[bytes]) -> None:
        del self._samples[task]
        _settle(task, outcome)
        self._draw()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        turns = self._loop.create_task(self._take_turns())
        self._loop.run_forever()
        self._asked.clear()
        for task in (turns, *self._samples):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(turns, *self._samples, return_exceptions=True))
        self._loop.close()

    async def _take_turns(self) -> None:
        while True:
            self._came.clear()
            for session_id in list(self._queues):
                queue = self._queues[session_id]
                job, outcome = queue.popleft()
                if not queue:
                    del self._queues[session_id]
                started = time.monotonic()
                task = self._loop.create_task(_of(job))
                await asyncio.wait([task])
                _settle(task, outcome)
                if self._samples:
                    await asyncio.wait(self._samples, timeout=time.monotonic() - started)
            if not self._queues:
                await self._came.wait()


async def _of(job: Job) -> bytes:
    return job()


def _settle(task: asyncio.Task[bytes], outcome: Future[bytes]) -> None:
    """Give a task's result or error to whoever waits."""
    if task.cancelled():
        outcome.set_exception(EngineError("The server stopped."))
    elif (error := task.exception()) is not None:
        _forget_locals(error)
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _forget_locals(error: BaseException | None) -> None:
    """Free what the functions that raised an error were computing with: it is kept until its client has read it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Order:
    """The requests of one model in the order of their `seq_id`, however they arrive."""

    def __init__(self, worker: JobWorker, model_id: str):
        self._worker, self._model_id = worker, model_id
        self._next = 1
        self._held: dict[int, tuple[Job, Future[bytes]]] = {}
        self._waited_s = 0.0  # for the request `_next`

    def add(self, seq_id: int, job: Job, outcome: Future[bytes]) -> None:
        """Queue a request when all before it have been; raise EngineError for one whose turn is over."""
        if seq_id < self._next:
            raise EngineError(
                f"The turn of request {seq_id} of {self._model_id} is over: its result is gone, or it came too late."
            )
        self._held[seq_id] = job, outcome
        while self._next in self._held:
            self._worker.put(self._model_id.partition(":")[0], *self._held.pop(self._next))
            self._next += 1
            self._waited_s = 0.0

    def give_up(self, after_s: float, passed_s: float) -> None:
        """Refuse the requests that have waited `after_s` seconds for an earlier one, `passed_s` since the last call."""
        self._waited_s = self._waited_s + passed_s if self._held else 0.0
        if not self._held or self._waited_s <= after_s:
            return
        text = (
            f"The request {self._next} of {self._model_id} has not arrived within {after_s:g} s, so those after it did not "
            "run: a client has lost it. Next: repeat the step, or begin again from saved weights."
        )
        for _, outcome in self._held.values():
            outcome.set_exception(EngineError(text))
        self._next = max(self._held) + 1
        self._held.clear()
