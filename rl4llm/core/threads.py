"""Blocking work beside an event loop, in threads that nothing has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """The result of blocking work in a thread of its own: it starts at once, and one that hangs does not keep the process,
    as one of an executor's would."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(outcome, work), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _settle(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits for it raises the error
        outcome.set_exception(error)
