"""The event loop of an engine, in a separate thread, so that whoever waits for it may run in an event loop too."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar
from weakref import finalize

import torch

from rl4llm.runtime import devices
from rl4llm.runtime.threads import OneThread, end_openmp_threads, result_of

T = TypeVar("T")
END_S = 10.0  # until a cancelled coroutine must have ended
LOOK_S = 0.5  # between two looks at signals
OWN_LOOP = "This would wait for its own event loop. In an async function, await the coroutine instead."
_calls: contextvars.ContextVar[SimpleQueue[Callable[[], None] | None]] = contextvars.ContextVar("calls")


class Runner:
    """Run coroutines in an event loop of a separate thread.

        with Runner() as runner:
            runner.run(client.load(WeightRef(0)))

    Unlike ``asyncio.Runner`` it also works in a notebook or an ``async def``, whose own event loop waits too, and from
    several threads. All coroutines share one thread and one event loop, which stands still while there are none. Each sees
    the context variables and the current device of its caller, and computes without gradients. When an exception interrupts
    the caller of `run`, such as the KeyboardInterrupt of Ctrl-C, the coroutine is cancelled and gets `END_S` seconds to end.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = OneThread("rl4llm-loop")
        self._ident = 0  # of the thread, while its loop runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[Running[Any]] = set()
        self._changes = threading.Lock()
        self._lost = False  # whether an interrupted coroutine did not end
        self._end = finalize(self, self._thread.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, or raise its error. Raises RuntimeError inside this runner's own loop."""
        if self._lost or self._ident == threading.get_ident():
            coroutine.close()
            raise KeyboardInterrupt if self._lost else RuntimeError(OWN_LOOP)
        running = self.start(coroutine)
        try:
            running.wait([running.outcome])
            return running.outcome.result()
        finally:
            if not running.outcome.done():  # this thread was interrupted
                self._lost = True
                self._lost = not end_all([running])

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        """Begin a coroutine, and return at once."""
        running = Running(coroutine, contextvars.copy_context())
        with self._changes:
            if self._loop is None:
                self._loop = self._thread.put(self._runner.get_loop).result()
            idle = not self._running
            self._running.add(running)
            self._loop.call_soon_threadsafe(running.begin, self._over)
            if idle:
                end_openmp_threads()
                self._thread.put(partial(self._turn, self._loop, devices.current()))
        return running

    def cancel(self) -> None:
        """Cancel all coroutines, from any thread; `run` raises CancelledError."""
        for running in tuple(self._running):
            running.cancel()

    def close(self) -> None:
        """Cancel what still runs, and close the event loop."""
        self._lost = not end_all(tuple(self._running)) or self._lost
        if self._end.alive and not self._lost:
            self._thread.put(self._close_loop).result()
        self._end()

    def _close_loop(self) -> None:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a task's own, which `_turn` already raised
            self._runner.close()

    def _turn(self, loop: asyncio.AbstractEventLoop, device: AbstractContextManager[Any]) -> None:
        """Run the loop until no coroutine is left."""
        self._ident = threading.get_ident()
        try:
            # Not `run_until_complete`: coroutines that other threads start meanwhile share this turn, and only the last to
            # end stops the loop, so that no thread waits for the coroutines of another.
            with torch.no_grad(), device:
                loop.run_forever()
        except BaseException as error:  # noqa: BLE001 - a task's SystemExit ends the loop, and `run` raises it
            with self._changes:
                for running in self._running:
                    running.outcome.set_exception(error)
                self._running.clear()
        finally:
            self._ident = 0

    def _over(self, running: Running[Any]) -> None:
        with self._changes:
            self._running.discard(running)
            if self._ident and not self._running and self._loop is not None:  # `close` runs the loop itself
                self._loop.stop()


@dataclass(slots=True, eq=False)
class Running(Generic[T]):
    """A coroutine that a `Runner` has begun, with what surrounds its caller.

    Whoever waits for it runs what no other thread may run, see `in_caller`.
    """

    coroutine: Coroutine[Any, Any, T]
    context: contextvars.Context
    outcome: Future[T] = field(default_factory=Future)
    _calls: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    _task: asyncio.Task[T] | None = None
    _cancelled: bool = False

    def begin(self, over: Callable[[Running[Any]], None]) -> None:
        """Create the task in the running event loop, which calls `over` when it has ended."""
        self.context.run(_calls.set, self._calls)
        self._task = asyncio.get_running_loop().create_task(self.coroutine, context=self.context)
        self._task.add_done_callback(partial(self._end, over))
        if self._cancelled:
            self._task.cancel()

    def wait(self, outcomes: Sequence[Future[Any]]) -> None:
        """Return when all of these have their results, which the coroutine or its tasks set, or the coroutine has ended."""
        self.outcome.add_done_callback(lambda _: self._calls.put(None))
        for outcome in outcomes:
            outcome.add_done_callback(lambda _: self._calls.put(None))
            while not (outcome.done() or self.outcome.done()):
                if (call := self._next_call()) is not None:
                    call()

    def cancel(self) -> None:
        """Cancel the coroutine, even if it has not begun."""
        self._cancelled = True
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _end(self, over: Callable[[Running[Any]], None], task: asyncio.Task[T]) -> None:
        over(self)
        if self.outcome.done():  # the loop itself ended, see `Runner._turn`
            return
        if task.cancelled():
            self.outcome.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def _next_call(self) -> Callable[[], None] | None:
        """Wait for a function to call; return None when something has ended."""
        while True:  # a signal that arrives just before the wait is handled only after it
            with contextlib.suppress(Empty):
                return self._calls.get(timeout=LOOK_S)


def end_all(running: Sequence[Running[Any]]) -> bool:
    """Cancel coroutines, and return whether all of them ended within `END_S` seconds."""
    for coroutine in running:
        coroutine.cancel()
    return not wait([coroutine.outcome for coroutine in running], END_S).not_done


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in a new event loop, as ``asyncio.run``, but also while another one runs."""
    with Runner() as runner:
        return runner.run(coroutine)


async def in_caller(work: Callable[[], T]) -> T:
    """Return the result of blocking work in the thread that waits for the coroutine, usually the main thread.

    It is for what no other thread may do, such as setting a signal handler. Meanwhile the event loop continues.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)

    _calls.get().put(call)
    return await result_of(outcome)


def all_together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Run coroutines concurrently; return what each of them returned or raised."""

    async def gathered() -> Any:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return list(run(gathered()))


def awaited(values: Sequence[Any]) -> list[Any]:
    """Return values in their order, with what each coroutine among them returned or raised; see `all_together`."""
    coroutines = [value for value in values if isinstance(value, Coroutine)]
    results = iter(all_together(coroutines) if coroutines else [])
    return [next(results) if isinstance(value, Coroutine) else value for value in values]
