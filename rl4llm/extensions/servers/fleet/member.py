"""One server of a fleet: its standing, its running requests, and the conversations whose cache it has."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl4llm.core.errors import UnreachableError
from rl4llm.extensions.servers.clients.server import ServerClient
from rl4llm.runtime.endpoints import Endpoint
from rl4llm.runtime.seeds import derive_seed
from rl4llm.runtime.transport import Retry

T = TypeVar("T")

OVER_SHARE = 1.25  # conversations that a server may have, relative to its share
GROUP_SLACK = 8  # more conversations on top, so that a group is not split because of a few rows
REST = Retry(first_wait_s=0.5, longest_wait_s=3.0)  # so that a new or restarted server serves within a second


class StaleReplyError(UnreachableError):
    """A reply sampled from other weights than those verified on its server."""


class MovedError(UnreachableError):
    """A request was taken from a server that left the pool."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What a fleet tolerates, and for how long.

    A server leaves after `failures_in_a_row`. Its health is checked every `check_every_s`, and it must answer within
    `check_deadline_s`. A server that is out is tried again after `rest`, if it accepts a connection within `connect_s`. The
    rest grows only when the server fails to prove its weights: trying one that is down, or still boots, costs nothing.
    While no server is left, a warning is logged every `warn_every_s`, and after `all_down_limit_s` the fleet gives up.
    """

    failures_in_a_row: int = 3
    check_every_s: float = 3.0
    check_deadline_s: float = 30.0
    connect_s: float = 2.0
    rest: Retry = REST
    warn_every_s: float = 10.0
    all_down_limit_s: float = 1800.0


class Member(Endpoint):
    """One server's standing in the fleet; `load` counts its conversations."""

    def __init__(self, client: ServerClient):
        self.client = client
        self.suspect = False  # whether to compare its weights again
        self.version: int | None = None  # the last one verified
        self.checksum: str | None = None
        self.failures = 0  # in a row
        self.strikes = 0  # how often it left, or failed to prove its weights, since it last served
        self.replies = 0
        self.ready_at = 0.0  # when it may be asked again; it reported that it is busy
        self._under_way: set[asyncio.Task[Any]] = set()
        self._idle_s = 0.0  # that have been counted, until `_idle_from`
        self._idle_from = time.monotonic()
        super().__init__(client.base_url)

    def bind(self) -> None:
        super().bind()
        self.lock = asyncio.Lock()  # held while its weights or its standing change
        self._under_way.clear()

    async def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Return a request's result; raise MovedError if the server leaves the pool meanwhile."""
        task = asyncio.create_task(request)
        self._count_idle()
        self._under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise MovedError(f"{self} left the pool: {self.reason}") from None
        finally:
            self._count_idle()
            self._under_way.discard(task)

    def idle_s(self) -> float:
        """Return the seconds since the last call in which it had no request."""
        self._count_idle()
        seconds, self._idle_s = self._idle_s, 0.0
        return seconds

    def _count_idle(self) -> None:
        """Count the time until now; called before requests come or go."""
        now = time.monotonic()
        self._idle_s += 0.0 if self._under_way else now - self._idle_from
        self._idle_from = now

    def give_up_requests(self) -> None:
        """Cancel all running requests, so that they move to another server."""
        for task in self._under_way:
            task.cancel()

    def worked(self) -> None:
        """Record a good reply."""
        self.failures = self.strikes = 0
        self.replies += 1


class Homes:
    """The server that holds the cache of each conversation.

    Conversations of one prompt go to the same server, unless it has far more than its share: rendezvous hashing
    (Thaler, Ravishankar 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018).
    """

    def __init__(self) -> None:
        self.moved = 0
        self.of: dict[str, Member] = {}

    def place(self, session: str, options: Sequence[Member]) -> Member:
        """Return the server of a session's next request: the same as before if that is one of the options."""
        home = self.of.get(session)
        if home is not None and home in options:
            return home
        if home is not None:
            self.moved += 1
            home.load -= 1
        self.of[session] = chosen = self._choose(session, options)
        chosen.load += 1
        return chosen

    def release(self, session: str) -> None:
        """Forget a conversation that is over."""
        home = self.of.pop(session, None)
        if home is not None:
            home.load -= 1

    @staticmethod
    def _choose(session: str, options: Sequence[Member]) -> Member:
        prompt = session.rpartition("/")[0] or session
        ranked = sorted(options, key=lambda member: derive_seed(prompt, str(member)), reverse=True)
        total = 1 + sum(member.load for member in options)
        bound = math.ceil(OVER_SHARE * total / len(options)) + GROUP_SLACK
        return next((member for member in ranked if member.load < bound), ranked[0])


@dataclass(slots=True)
class Trip:
    """Records the servers that a request was sent to."""

    session: str
    tried: list[Member] = field(default_factory=list)
    attempts: int = 0
    failures: int = 0
    rounds: int = 0
