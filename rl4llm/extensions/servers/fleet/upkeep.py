"""The upkeep of a fleet: check the health of servers, load weights, and verify them before the servers serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

from rl4llm.core.errors import EngineError, EnginesDownError, StaleWeightsError, UnreachableError
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.server import ServerClient
from rl4llm.extensions.servers.fleet.member import FleetLimits, Member
from rl4llm.runtime.endpoints import EndpointPool

T = TypeVar("T")
TOO_SLOW = "its health check timed out"
STOOD_STILL_S = 1.0


class Upkeep:
    """Keeps servers, and a router in front of them, in the pool while they are healthy and hold verified weights.

    `target` are the weights that they should hold, and `checksum` is that of most of them. While they are paused or asleep
    on purpose, their health is not checked.
    """

    def __init__(
        self,
        servers: Sequence[Member],
        router: Member | None,
        limits: FleetLimits,
        warn: Callable[[str], None],
    ):
        self.servers, self.router = servers, router
        self.pool = EndpointPool(
            "server",
            [*servers, *([router] if router else [])],
            self._take_care,
            EnginesDownError,
            limit_s=limits.all_down_limit_s,
            warn_every_s=limits.warn_every_s,
            warn=warn,
            cure="Start one with `rl4llm serve`, or set inference.wait_s to wait less.",
        )
        self.target: WeightRef | None = None
        self.checksum: str | None = None
        self.paused = False
        self.asleep: set[str] = set()
        self._limits = limits
        self._together = servers[0].client.together

    @property
    def resting(self) -> bool:
        return self.paused or bool(self.asleep)

    def serving(self) -> list[Member]:
        """Return the servers in the pool, without the router."""
        return [member for member in self.servers if member.up]

    def leave(self, member: Member, reason: str, *, move: bool = False) -> None:
        """Take a server out of the pool; with `move`, its running requests move to others."""
        member.strikes += member.up
        self.pool.leave(member, reason)
        if move:
            member.give_up_requests()

    async def load(self, weight_ref: WeightRef) -> None:
        """Have every server load the weights; one that cannot leaves the pool, and the others continue.

        A server that is out gets them before it comes back. Raises EngineError when no server loaded them, and
        StaleWeightsError when servers that report success hold different weights.
        """
        self.pool.start()
        self.target, self.checksum = weight_ref, None
        members = self.serving() or self.servers
        problems = await self._load_into(members, weight_ref)
        if not self.serving():
            problems += await self._load_into(
                [member for member in self.servers if member not in members], weight_ref
            )
        if not self.serving():
            refusals = [problem for problem in problems if not isinstance(problem, UnreachableError)]
            if refusals:
                raise refusals[0]
            await self.pool.wait(self.serving)
        self._compare()

    async def ask_all(self, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        """Return the answers of all servers in the pool; one that does not answer leaves it."""
        self.pool.start()
        while True:
            answers = await asyncio.gather(*(self._ask_one(member, ask) for member in self.serving()))
            results = list(chain.from_iterable(answers))
            if results:
                return results
            await self.pool.wait(self.serving)

    async def _ask_one(self, member: Member, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        """Return the answer of one server in a list; an empty list if there is none."""
        try:
            async with member.lock:  # not during a health check
                return [await ask(member.client)]
        except UnreachableError as error:
            self.leave(member, str(error), move=True)
            return []

    async def _load_into(self, members: Sequence[Member], weight_ref: WeightRef) -> list[EngineError]:
        clients = [member.client for member in members]
        with self._together.expecting(clients, weight_ref):
            problems = await asyncio.gather(*(self._load_one(member, weight_ref) for member in members))
        return [problem for problem in problems if problem is not None]

    async def _load_one(self, member: Member, weight_ref: WeightRef) -> EngineError | None:
        async with member.lock:
            try:
                await member.client.load(weight_ref)
                member.checksum = member.client.digest
            except EngineError as error:
                self.leave(member, str(error), move=True)
                return error
            finally:
                self._together.gone(member.client)
            member.version = weight_ref.version
            self._admit(member)
            return None

    def _compare(self) -> None:
        """Take servers out whose weights differ from those of most; raise StaleWeightsError if there is no majority."""
        pool = self.serving()
        if not pool:
            return
        [(checksum, most), *_] = Counter(member.checksum for member in pool).most_common()
        if 2 * most <= len(pool):
            digests = "; ".join(f"{member}: {member.checksum}" for member in pool)
            raise StaleWeightsError(
                f"The servers report version {pool[0].version} but hold different weights ({digests}). Start all servers "
                "with the same flags (dtype, parallelism), and look for corrupted files."
            )
        self.checksum = checksum
        for member in pool:
            if member.checksum != checksum:
                self.leave(member, "its weights differ from those of the other servers", move=True)

    def _admit(self, member: Member) -> None:
        member.suspect, member.failures, member.ready_at = False, 0, 0.0
        self.pool.admit(member)

    async def _take_care(self, member: Member) -> None:
        """Look after one server for as long as the event loop runs."""
        while True:
            if self.resting:
                await member.rest(self._limits.check_every_s)
            elif member.up:
                await self.check(member)
                if member.up:
                    await member.rest(self._limits.check_every_s)
                if member.up:  # it stayed in the pool; a router's replies do not name their server
                    member.strikes = 0
            else:
                await asyncio.sleep(self._limits.rest.wait_s(max(0, member.strikes - 1)))
                await self._bring_back(member)

    async def check(self, member: Member) -> None:
        """Check the health and the version of a server in the pool; if it fails, it leaves and its requests move."""
        replies = member.replies
        async with member.lock:
            try:
                async with asyncio.timeout(self._limits.check_deadline_s) as deadline:
                    await self._ask_health(member)
                    if member.suspect or member.version is not None:
                        await self._check_held(member)
            except StaleWeightsError as error:
                self.leave(member, str(error), move=True)
            except (EngineError, TimeoutError) as error:
                now = asyncio.get_running_loop().time()
                late_s = now - (deadline.when() or now)  # large if this process was busy training
                if member.replies == replies and not self.resting and late_s < STOOD_STILL_S:
                    self.leave(member, str(error) or TOO_SLOW, move=True)

    async def _ask_health(self, member: Member) -> None:
        """Check the health of a server; a router only has to answer, since it holds no weights."""
        if member is self.router:
            await member.client.http.ping("/health")
        else:
            await member.client.health()

    async def _check_held(self, member: Member) -> None:
        version = await member.client.version()
        accepted = {member.version}
        if self.target and self.target.held:  # another rank publishes, perhaps just now
            accepted |= {self.target.version, self.target.version + 1}
        if member.version is not None and version not in accepted:
            raise StaleWeightsError(f"it reports version {version} of the weights, not {member.version}")
        if member.suspect and self.checksum is not None and await member.client.checksum() != self.checksum:
            raise StaleWeightsError(f"its weights of version {version} have changed")
        member.suspect = False

    async def _bring_back(self, member: Member) -> None:
        """Try to bring a server back: check its health, and load and verify the newest weights if it misses them."""
        proves = False
        async with member.lock:
            try:
                await member.client.http.knock(deadline_s=self._limits.connect_s)
                async with asyncio.timeout(self._limits.check_deadline_s):
                    if member is not self.router:
                        # a failed load or a dead trainer may have left it paused
                        await member.client.resume()
                    await self._ask_health(member)
                target = self.target
                if target is not None and member is not self.router:
                    proves = not target.held  # else another rank loads them, and this one only waits
                    await self._prove(member, target)
                if target is self.target and not member.up:
                    self._admit(member)
            except (EngineError, TimeoutError) as error:
                member.strikes += proves
                member.reason = str(error) or TOO_SLOW

    async def _prove(self, member: Member, target: WeightRef) -> None:
        if not await self._holds(member, target, loaded=False):
            await member.client.load(target)
            if not await self._holds(member, target, loaded=True):
                raise StaleWeightsError(f"its weights of version {target.version} differ from the others'")
        member.version = target.version

    async def _holds(self, member: Member, target: WeightRef, *, loaded: bool) -> bool:
        """Return whether a server holds the verified weights; if none are verified yet, those that it just loaded count."""
        if await member.client.version() != target.version:
            return False
        member.checksum = await member.client.checksum()
        if loaded and self.checksum is None:
            return True
        return member.checksum == self.checksum and (loaded or member.checksum is not None)
