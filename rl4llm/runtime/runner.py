"""The event loop of an engine, in a separate thread, so that whoever waits for it may run in an event loop too."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar
from weakref import finalize

import torch

from rl4llm.runtime.threads import OneThread, result_of

T = TypeVar("T")
END_S = 10.0  # until a cancelled coroutine must have ended
LOOK_S = 0.5  # between two looks at signals
OWN_LOOP = "This would wait for its own event loop. In an async function, await the coroutine instead."
_calls: contextvars.ContextVar[SimpleQueue[Callable[[], None] | None]] = contextvars.ContextVar("calls")


class Runner:
    """Run coroutines in an event loop of a separate thread, one after the other, and wait for each of them.

        with Runner() as runner:
            runner.run(client.load(WeightRef(0)))

    Unlike ``asyncio.Runner`` it also works in a notebook or an ``async def``, whose own event loop waits too. All coroutines
    of a runner share one thread and one event loop, which stands still between two of them. Each sees the context
    variables, the CUDA device and the inference mode of its caller. When an exception interrupts the caller, such as the
    KeyboardInterrupt of Ctrl-C, the coroutine is cancelled and gets `END_S` seconds to end.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = OneThread("rl4llm-loop")
        self._current: _Awaited[Any] | None = None
        self._lost = False  # whether an interrupted coroutine did not end
        self._end = finalize(self, self._thread.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, or raise its error. Raises RuntimeError inside this runner's own loop."""
        if self._lost or (self._current is not None and self._current.thread == threading.get_ident()):
            coroutine.close()
            raise KeyboardInterrupt if self._lost else RuntimeError(OWN_LOOP)
        run = _Awaited(coroutine)
        outcome = self._thread.put(partial(self._play, run))
        try:
            outcome.add_done_callback(lambda _: run.calls.put(None))
            while (call := run.next_call()) is not None:
                call()
            return outcome.result()
        finally:
            if not outcome.done():  # this thread was interrupted
                self._lost = True
                run.cancel()
                wait([outcome], END_S)
                self._lost = not outcome.done()

    def cancel(self) -> None:
        """Cancel the coroutine that runs now, from any thread; its `run` raises CancelledError."""
        if (current := self._current) is not None:
            current.cancel()

    def close(self) -> None:
        """Cancel the tasks that are left, and close the event loop."""
        if self._end.alive and not self._lost:
            self._thread.put(self._runner.close).result()
        self._end()

    def _play(self, run: _Awaited[T]) -> T:
        self._current = run
        try:
            with torch.inference_mode(run.inference), torch.cuda.device(run.device):
                return self._runner.run(run.main(), context=run.context)
        finally:
            self._current = None


class _Awaited(Generic[T]):
    """A coroutine with what surrounds its caller, and functions that the caller should call while it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]):
        self.coroutine = coroutine
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.context = contextvars.copy_context()
        self.context.run(_calls.set, self.calls)
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self.thread = 0
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def main(self) -> T:
        self.thread, self._task = threading.get_ident(), asyncio.current_task()
        if self._cancelled:
            self.coroutine.close()
            raise asyncio.CancelledError
        return await self.coroutine

    def next_call(self) -> Callable[[], None] | None:
        """Wait for a function to call; return None when the coroutine has ended."""
        while True:  # a signal that arrives just before the wait is handled only after it
            with contextlib.suppress(Empty):
                return self.calls.get(timeout=LOOK_S)

    def cancel(self) -> None:
        """Cancel the coroutine, even if it has not begun."""
        self._cancelled = True
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in a new event loop, as ``asyncio.run``, but also while another one runs."""
    with Runner() as runner:
        return runner.run(coroutine)


async def in_caller(work: Callable[[], T]) -> T:
    """Return the result of blocking work in the thread that waits in `Runner.run`, usually the main thread.

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
