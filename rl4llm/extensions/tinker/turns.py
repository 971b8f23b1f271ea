"""One thread computes everything: requests of each model in their order, models by turns, and samples in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from rl4llm.core.errors import EngineError

Job = Callable[[], bytes]
"""Computes the body of an answer."""

Draw = Callable[[], Coroutine[Any, Any, bytes]]
"""Computes it beside other samples."""


class JobWorker:
    """Runs jobs and samples in a thread with its own event loop; everything else may be called from any thread.

    A job holds up the samples that are being drawn. After each, samples get as long as it took, while there are any.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._queues: dict[str, deque[tuple[Job, Future[bytes]]]] = {}
        self._samples: set[asyncio.Task[bytes]] = set()
        self._came = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rl4llm-tinker", daemon=True)
        self._thread.start()

    def put(self, model_id: str, job: Job, outcome: Future[bytes]) -> None:
        """Queue a job behind the others of its model; `outcome` gets its answer."""
        self._loop.call_soon_threadsafe(self._add, model_id, job, outcome)

    def sample(self, draw: Draw, outcome: Future[bytes]) -> None:
        """Start drawing samples; `outcome` gets the answer."""
        self._loop.call_soon_threadsafe(self._start, draw, outcome)

    def close(self) -> None:
        """End the thread; what is queued is never computed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _add(self, model_id: str, job: Job, outcome: Future[bytes]) -> None:
        self._queues.setdefault(model_id, deque()).append((job, outcome))
        self._came.set()

    def _start(self, draw: Draw, outcome: Future[bytes]) -> None:
        task = self._loop.create_task(draw())
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)
        task.add_done_callback(lambda done: _settle(done, outcome))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        turns = self._loop.create_task(self._take_turns())
        self._loop.run_forever()
        for task in (turns, *self._samples):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(turns, *self._samples, return_exceptions=True))
        self._loop.close()

    async def _take_turns(self) -> None:
        while True:
            self._came.clear()
            for model_id in list(self._queues):
                queue = self._queues[model_id]
                job, outcome = queue.popleft()
                if not queue:
                    del self._queues[model_id]
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
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class Order:
    """The requests of one model in the order of their `seq_id`, however they arrive."""

    def __init__(self, worker: JobWorker, model_id: str):
        self._worker, self._model_id = worker, model_id
        self._next = 1
        self._held: dict[int, tuple[Job, Future[bytes]]] = {}

    def add(self, seq_id: int, job: Job, outcome: Future[bytes]) -> None:
        """Queue a request when all before it have been; raise EngineError for one whose turn is over."""
        if seq_id < self._next:
            raise EngineError(
                f"The request {seq_id} of {self._model_id} was answered, and its result is gone."
            )
        self._held[seq_id] = job, outcome
        while self._next in self._held:
            self._worker.put(self._model_id, *self._held.pop(self._next))
            self._next += 1
