"""One server of a fleet: its standing, what is under way at it, and which conversations are at home there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl4llm.core.errors import UnreachableError
from rl4llm.core.seeds import derive_seed
from rl4llm.inference.server import ServerClient
from rl4llm.inference.transport import Retry

T = TypeVar("T")

OVER_SHARE = 1.25  # conversations that a server may have, relative to its share
GROUP_SLACK = 8  # and beyond that, so that a group is not split for the sake of a few rows
REST = Retry(first_wait_s=0.5, longest_wait_s=3.0)  # a server that is added, or back, serves within a second


class StaleReplyError(UnreachableError):
    """A reply sampled from other weights than its server was proven to hold."""


class MovedError(UnreachableError):
    """A request was taken from a server that left the pool."""


@dataclass(frozen=True, slots=True)
class Patience:
    """What the fleet puts up with, and for how long.

    `failures_in_a_row` take a server out. Its health is asked for every `check_every_s`, and must be told within
    `check_deadline_s`. A server that is out, and takes a connection within `connect_s`, is tried again after a rest, which
    grows only when it fails to prove its weights: to ask where nobody is, or who still boots, costs nothing. While no
    server is left, a line is warned every `warn_every_s`, and after `all_down_limit_s` the fleet gives up.
    """

    failures_in_a_row: int = 3
    check_every_s: float = 3.0
    check_deadline_s: float = 30.0
    connect_s: float = 2.0
    rest: Retry = REST
    warn_every_s: float = 10.0
    all_down_limit_s: float = 1800.0


class Member:
    """One server's standing in the fleet. `version` is the one that it was last proven to hold."""

    def __init__(self, client: ServerClient):
        self.client = client
        self.in_pool = True
        self.suspect = False  # its weights are to be compared again
        self.reason = ""
        self.version: int | None = None
        self.checksum: str | None = None
        self.failures = 0  # in a row
        self.strikes = 0  # how often it left the pool or failed to prove its weights since it served, or stayed, last
        self.replies = 0
        self.ready_at = 0.0  # it asked not to be asked before
        self.sessions = 0
        self._under_way: set[asyncio.Task[Any]] = set()
        self.bind()

    def __str__(self) -> str:
        return self.client.base_url

    def bind(self) -> None:
        """Belong to another event loop."""
        self.lock = asyncio.Lock()  # of what changes its weights or its standing
        self._poked = asyncio.Event()
        self._under_way.clear()

    async def run(self, request: Coroutine[Any, Any, T]) -> T:
        """A request's result; raises MovedError when the server leaves the pool meanwhile."""
        task = asyncio.create_task(request)
        self._under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise MovedError(f"{self} left the pool: {self.reason}") from None
        finally:
            self._under_way.discard(task)

    def give_up_requests(self) -> None:
        """Have whoever waits for this server ask another one."""
        for task in self._under_way:
            task.cancel()

    def worked(self) -> None:
        """A good reply came."""
        self.failures = self.strikes = 0
        self.replies += 1

    def poke(self) -> None:
        """Have its caretaker look now."""
        self._poked.set()

    async def wait(self, seconds: float) -> None:
        """Until it is poked, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        except TimeoutError:
            return
        finally:
            self._poked.clear()


class Homes:
    """Which server has the cache of which conversation.

    The conversations of one prompt go to the same server, unless it has far more than its share: rendezvous hashing
    (Thaler, Ravishankar 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018).
    """

    def __init__(self) -> None:
        self.moved = 0
        self.of: dict[str, Member] = {}

    def place(self, session: str, options: Sequence[Member]) -> Member:
        """The server of a session's next request: where it was before, if that is one of the options."""
        home = self.of.get(session)
        if home is not None and home in options:
            return home
        if home is not None:
            self.moved += 1
            home.sessions -= 1
        self.of[session] = chosen = self._choose(session, options)
        chosen.sessions += 1
        return chosen

    def release(self, session: str) -> None:
        """The conversation is over."""
        home = self.of.pop(session, None)
        if home is not None:
            home.sessions -= 1

    @staticmethod
    def _choose(session: str, options: Sequence[Member]) -> Member:
        prompt = session.rpartition("/")[0] or session
        ranked = sorted(options, key=lambda member: derive_seed(prompt, str(member)), reverse=True)
        total = 1 + sum(member.sessions for member in options)
        bound = math.ceil(OVER_SHARE * total / len(options)) + GROUP_SLACK
        return next((member for member in ranked if member.sessions < bound), ranked[0])


@dataclass(slots=True)
class Trip:
    """One request's way from server to server."""

    session: str
    tried: list[Member] = field(default_factory=list)
    attempts: int = 0
    failures: int = 0
    rounds: int = 0
