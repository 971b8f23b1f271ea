"""Blocking work beside an event loop, in threads that nothing has to wait for."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """The result of blocking work in a thread of its own: it starts at once, and one that hangs does not keep the process,
    as one of an executor's would."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(outcome, work), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


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


def _settle(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits for it raises the error
        outcome.set_exception(error)
