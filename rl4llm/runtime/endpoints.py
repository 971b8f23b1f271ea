"""A pool of endpoints that do the same work: which of them are up, how they come back, and what happens when none is up.

An endpoint is up, and gets work, until it leaves the pool. Its caretaker, one task per endpoint, brings it back. While none
is up, all requests wait together. A warning is logged now and then with the reasons, and after `limit_s` the pool gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Endpoint:
    """One server or host. `reason` is why it is not up; `load` counts the work that it has."""

    def __init__(self, name: str, *, up: bool = True):
        self.name, self.up = name, up
        self.reason = ""
        self.load = 0
        self.left = False  # whether it left the pool since it was last up
        self.bind()

    def __str__(self) -> str:
        return self.name

    def bind(self) -> None:
        """Attach the endpoint to another event loop."""
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Wake its caretaker."""
        self._poked.set()

    async def rest(self, seconds: float) -> None:
        """Wait until `poke`, or for this many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        self._poked.clear()


E = TypeVar("E", bound=Endpoint)


class EndpointPool(Generic[E]):
    """Endpoints of one kind.

    Args:
        what: the word for an endpoint in messages, for example "server".
        endpoints: all of them.
        care: looks after one endpoint for as long as the event loop runs.
        gone: the error raised when none came up in time.
        limit_s: how long requests wait for an endpoint, in seconds.
        warn_every_s: seconds between two warnings that requests wait.
        warn: gets these warnings, and one whenever an endpoint leaves or comes back.
        cure: what to do while none is up, as a sentence of these warnings.
    """

    def __init__(
        self,
        what: str,
        endpoints: Sequence[E],
        care: Callable[[E], Coroutine[Any, Any, None]],
        gone: type[Exception],
        *,
        limit_s: float,
        warn_every_s: float,
        warn: Callable[[str], None],
        cure: str = "Start one to continue.",
    ):
        self.endpoints = list(endpoints)
        self.limit_s, self.warn_every_s = limit_s, warn_every_s
        self.warn = warn
        self.counts: Counter[str] = Counter()
        self._what, self._care, self._gone, self._cure = what, care, gone, cure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caretakers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._waiting = 0
        self._down_since = self._next_line = 0.0

    def up(self) -> list[E]:
        return [endpoint for endpoint in self.endpoints if endpoint.up]

    def start(self) -> None:
        """Start a caretaker for each endpoint in this event loop; raise the error of one that failed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._changed = loop, asyncio.Event()
            for endpoint in self.endpoints:
                endpoint.bind()
            self._caretakers = [loop.create_task(self._care(endpoint)) for endpoint in self.endpoints]
        for task in self._caretakers:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Stop the caretakers; `start` starts new ones."""
        caretakers, self._caretakers, self._loop = self._caretakers, [], None
        for task in caretakers:
            task.cancel()
        await asyncio.gather(*caretakers, return_exceptions=True)

    def leave(self, endpoint: E, reason: str) -> None:
        """Take an endpoint out of the pool; it gets no more work."""
        if endpoint.up:
            endpoint.up, endpoint.left, endpoint.reason = False, True, reason
            self.counts["left"] += 1
            self.warn(
                f"{self._what.capitalize()} {endpoint} leaves the pool of {len(self.endpoints)}: {reason}"
            )
        endpoint.poke()

    def admit(self, endpoint: E) -> None:
        """Put an endpoint back into the pool."""
        if endpoint.left:
            self.counts["came_back"] += 1
            self.warn(f"{self._what.capitalize()} {endpoint} is back in the pool of {len(self.endpoints)}.")
        endpoint.up, endpoint.left = True, False
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, ready: Callable[[], object]) -> None:
        """Wait until `ready()` is true, checked whenever an endpoint comes back; raise `gone` after `limit_s`."""
        with self._in_line():
            while not ready():
                await self._next_change()

    async def first(self, ask: Callable[[E], Awaitable[T]], lost: type[Exception], again_after_s: float) -> T:
        """Return the answer of the first endpoint that does not raise `lost`, up or not.

        When all of them raise it, they are asked again after `again_after_s` or when one comes back.
        """
        with self._in_line():
            while True:
                for endpoint in self.endpoints:
                    try:
                        return await ask(endpoint)
                    except lost as error:
                        endpoint.reason = str(error)
                await self._next_change(again_after_s)

    @contextlib.contextmanager
    def _in_line(self) -> Iterator[None]:
        """Let all that wait share the clock of the first one."""
        if not self._waiting:
            self._down_since = self._next_line = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _next_change(self, at_most_s: float = float("inf")) -> None:
        """Wait until an endpoint comes back or the next warning is due; the first that wakes logs it."""
        now = time.monotonic()
        end = self._down_since + self.limit_s
        causes = "; ".join(
            item.reason if item.name in item.reason else f"{item}: {item.reason}"
            for item in self.endpoints
            if not item.up
        )
        if now >= end:
            raise self._gone(
                f"No {self._what} could serve for {self.limit_s:g} s ({causes}). Start them again; the same command "
                "then resumes the run."
            )
        if now >= self._next_line:
            self._next_line = now + self.warn_every_s
            self.warn(
                f"No {self._what} can serve; waiting since {now - self._down_since:.0f} s, at most {self.limit_s:g} s. "
                f"{self._cure} {causes}"
            )
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(end - now, self._next_line - now, at_most_s)):
                await changed.wait()
