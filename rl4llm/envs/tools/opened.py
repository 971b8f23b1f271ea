"""The tools of one episode, which one thread opens at the first call, calls and closes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from rl4llm.core.errors import EnvError
from rl4llm.envs.tools.tool import ToolError, ToolSet
from rl4llm.runtime.threads import OneThread, in_thread, result_of

T = TypeVar("T")


class OpenedSet:
    """The set that a tool set opened for one episode.

    If one of its tools is a plain function, one thread opens the set, calls plain functions and closes it. So it may keep
    objects that belong to a thread, such as a connection of sqlite3. Async tools run in the event loop, and a set that has
    no other is opened there and closed in a thread, as closing may block.
    """

    def __init__(self, home: ToolSet, sample: Any):
        self._home, self._sample = home, sample
        self._set: ToolSet | None = None
        plain = any(not inspect.iscoroutinefunction(tool.function) for tool in home.tools.values())
        self._thread = OneThread("rl4llm-tools") if plain else None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a tool; calls must not overlap."""
        opened = self._set
        if opened is None:
            opened = await self._done(self._opened)
        tool = opened.tools[name]
        if inspect.iscoroutinefunction(tool.function):
            return await tool.function(**arguments)
        return await self._done(lambda: tool.function(**arguments))

    def close(self) -> Future[None] | None:
        """Begin to close the set; None if an abandoned call still occupies its thread, which closes it later."""
        if self._thread is None:
            return None if self._set is None else in_thread("rl4llm-tools", self._close)
        waits = self._thread.is_idle
        closing = self._thread.put(self._close)
        self._thread.end()
        return closing if waits else None

    async def _done(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else await result_of(self._thread.put(work))

    def _opened(self) -> ToolSet:
        if self._set is None:
            try:
                self._set = self._home.open(self._sample)
            except ToolError as error:  # not the model's fault
                raise EnvError(f"{type(self._home).__name__}.open: {error}") from error
        return self._set

    def _close(self) -> None:
        if self._set is not None and self._set is not self._home:
            self._set.close()


def tried(work: Callable[[], T]) -> Future[T]:
    """Run work now and return its outcome as a future."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - a tool's own code; the future raises the error
        done.set_exception(error)
    return done
