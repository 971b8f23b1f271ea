"""A deadline for work of which most never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LateError(TimeoutError):
    """The deadline passed. Another TimeoutError is one of the work itself."""


@coroutine
def within(seconds: float | None, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """What `work` returns; it is cancelled, and LateError raised, when that takes longer. None is any time.

    As ``asyncio.timeout``, but the timer, which costs more than a small tool, is only set once the work waits for something:
    before that nothing could interrupt it.
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
    """The rest of `work`, which waits for `awaited`."""
    while True:
        go_on: Any = work.send
        try:
            given = yield awaited
        except BaseException as error:  # noqa: BLE001 - a cancellation, say: the work's own affair
            go_on, given = work.throw, error
        try:
            awaited = go_on(given)
        except StopIteration as done:
            return done.value
