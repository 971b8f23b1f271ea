"""Work that must not hold up an event loop: in threads that nothing has to wait for, or with a deadline."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from types import coroutine
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
KEPT = 64  # idle threads to keep; further ones end with their work


class _Work(NamedTuple):
    name: str
    work: Callable[[], Any]
    outcome: Future[Any]


# The queues of idle threads. A child process has none: only the thread that forks survives the fork.
_waiting: deque[SimpleQueue[_Work]] = deque()
os.register_at_fork(after_in_child=_waiting.clear)


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """Return the result of blocking work in a separate thread.

    It starts at once, and a thread that hangs does not keep the process alive, unlike an executor's. Idle threads are
    reused, which costs less than new ones.
    """
    return await result_of(in_thread(name, work))


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Start blocking work as `in_own_thread` does; return the future of its result."""
    job = _Work(name, work, Future())
    _start(job)
    return job.outcome


async def result_of(outcome: Future[T]) -> T:
    """Return the result of work in a thread. asyncio drops the traceback of a TimeoutError, which is kept here."""
    try:
        return await asyncio.wrap_future(outcome)
    except TimeoutError:
        return outcome.result()


class OneThread:
    """A thread that runs blocking functions one after the other, until `end`.

    It is for objects that must stay in one thread, such as a database connection.
    """

    def __init__(self, name: str):
        self._name = name
        self._jobs: SimpleQueue[_Work | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        _start(_Work(name, self._work, Future()))

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def put(self, work: Callable[[], T]) -> Future[T]:
        """Queue a function; return the future of its result."""
        job = _Work(self._name, work, Future())
        job.outcome.set_running_or_notify_cancel()
        self._last = job.outcome
        self._jobs.put(job)
        return job.outcome

    def end(self) -> None:
        """End the thread when all work is done."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, error = _tried(job.work)
            _tell(job, result, error)
            del job, result, error  # finished work is not kept alive while waiting


@contextmanager
def repeated(every_s: float, work: Callable[[], Any], name: str) -> Iterator[None]:
    """Do something in a separate thread, again and again every `every_s` seconds, until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def end_openmp_threads() -> None:
    """End the OpenMP threads of this thread's torch operations; its next operation starts new ones in microseconds.

    Each thread that computes has a separate team. While libgomp has more threads than there are cores, a waiting one does
    not spin, and short operations take half as long again. So a thread that passes computation to another ends its team.
    """
    if sys.platform == "linux" and "torch" in sys.modules:
        _pause_openmp()(1)  # omp_pause_soft


@functools.cache
def _pause_openmp() -> Callable[[int], Any]:
    library = ctypes.CDLL(None)
    is_libgomp = hasattr(library, "omp_pause_resource_all") and not hasattr(library, "kmp_set_blocktime")
    return library.omp_pause_resource_all if is_libgomp else lambda _: 0


async def call_off_loop(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function and return its result: await it if it is async, else run it in a separate thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await in_own_thread(name, lambda: function(*args))


def _start(job: _Work) -> None:
    job.outcome.set_running_or_notify_cancel()
    try:
        _waiting.pop().put(job)
    except IndexError:
        threading.Thread(target=_work_on, args=(job,), daemon=True).start()


def _work_on(job: _Work) -> None:
    """Run one piece of work after the other."""
    jobs: SimpleQueue[_Work] = SimpleQueue()
    waits = True
    while waits:
        threading.current_thread().name = job.name
        result, error = _tried(job.work)
        if waits := len(_waiting) < KEPT:
            _waiting.append(jobs)  # before the result is set, since more work may follow at once
        _tell(job, result, error)
        del job, result, error  # finished work is not kept alive while waiting
        if waits:
            job = jobs.get()


def _tell(job: _Work, result: Any, error: BaseException | None) -> None:
    if error is None:
        job.outcome.set_result(result)
    else:
        job.outcome.set_exception(error)


def _tried(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return what work in a new context returned or raised."""
    try:
        return contextvars.Context().run(work), None
    except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
        return None, error
    finally:
        end_openmp_threads()


class LateError(TimeoutError):
    """The deadline passed. Any other TimeoutError comes from the work itself."""


@coroutine
def within(seconds: float | None, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Return the result of `work`; cancel it and raise LateError after `seconds`. None means no deadline.

    Unlike ``asyncio.timeout`` it sets the timer, which costs more than a small tool, only once the work waits for something.
    Before that nothing could interrupt it.
    """
    until = None if seconds is None else asyncio.get_running_loop().time() + seconds
    try:
        awaited = work.send(None)
    except StopIteration as done:
        return done.value
    return (yield from _timed(until, _resumed(work, awaited)))


async def _timed(until: float | None, rest: Any) -> Any:
    limit = asyncio.timeout_at(until)
    try:
        async with limit:
            return await rest
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise LateError from error
        raise


@coroutine
def _resumed(work: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Run the rest of `work`, which waits for `awaited`."""
    while True:
        resume: Any = work.send
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001 - passed to the work, such as a cancellation
            resume, value = work.throw, error
        try:
            awaited = resume(value)
        except StopIteration as done:
            return done.value
