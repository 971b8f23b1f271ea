"""Blocking work beside an event loop, in threads that nothing has to wait for."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
KEPT = 64  # threads that wait for work; further ones end with theirs


class _Job(NamedTuple):
    name: str
    work: Callable[[], Any]
    outcome: Future[Any]


_waiting: deque[SimpleQueue[_Job]] = deque()  # the threads that have no work, each by where it takes the next from
os.register_at_fork(after_in_child=_waiting.clear)  # no thread but the one that forks is there any more


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """The result of blocking work in a thread of its own: it starts at once, and one that hangs does not keep the process,
    as one of an executor's would. A thread that is done takes the next work, which costs less than a new one."""
    job = _Job(name, work, Future())
    job.outcome.set_running_or_notify_cancel()
    try:
        _waiting.pop().put(job)
    except IndexError:
        threading.Thread(target=_work_on, args=(job,), daemon=True).start()
    return await asyncio.wrap_future(job.outcome)


async def call_off_loop(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function that somebody else wrote returns: awaited where it is async, else run in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await in_own_thread(name, lambda: function(*args))


def all_together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """What each of the coroutines returned or raised; they run at once, in an event loop of their own.

    It blocks, and may be called where an event loop runs.
    """
    results: list[list[T | Exception]] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(_gathered(coroutines))), daemon=True)
    thread.start()
    thread.join()
    return results[0]


async def _gathered(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    return list(await asyncio.gather(*coroutines, return_exceptions=True))


def _work_on(job: _Job) -> None:
    """Do one piece of work after the other, each in a context of its own."""
    jobs: SimpleQueue[_Job] = SimpleQueue()
    waits = True
    while waits:
        threading.current_thread().name = job.name
        result, error = _tried(contextvars.Context(), job.work)
        if waits := len(_waiting) < KEPT:
            _waiting.append(jobs)  # before anyone is told, who may have the next work at once
        if error is None:
            job.outcome.set_result(result)
        else:
            job.outcome.set_exception(error)
        del job, result, error  # what is done is not kept alive meanwhile
        if waits:
            job = jobs.get()


def _tried(context: contextvars.Context, work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return context.run(work), None
    except BaseException as error:  # noqa: BLE001 - whoever waits for it raises the error
        return None, error
