"""Several servers as one client: groups stay together, failed requests move, and only servers with verified weights serve.

A server is in the pool, and gets requests, until it fails: several failures in a row, a failed health check, a failed load,
or another version of the weights than was verified. It comes back when it is healthy and its version and checksum are those
of the servers in the pool. If they are not, it first gets the newest weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.server import (
    DamagedReplyError,
    DoubleReplyError,
    RequestNames,
    ServerClient,
)
from rl4llm.extensions.servers.fleet.member import (
    FleetLimits,
    Homes,
    Member,
    MovedError,
    StaleReplyError,
    Trip,
)
from rl4llm.extensions.servers.fleet.upkeep import Upkeep
from rl4llm.runtime.transport import NotConnectedError, Retry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FleetClient(BaseClient):
    """Servers of one kind, started with the same flags, as one client.

        fleet = FleetClient([SGLangClient(url, tokenizer, vocab_size=151936, context_length=4096) for url in urls])

    Args:
        router: a client of a router in front of them. Requests then go through it while it works, weights still to each
            server.
        retry: how often a request is tried, and how long it waits after all servers were tried.
        limits: when a server leaves the pool, and how long to wait while the pool is empty.
        warn: gets a message when a server leaves or comes back, and while the pool is empty.
    """

    def __init__(
        self,
        members: Sequence[ServerClient],
        *,
        router: ServerClient | None = None,
        retry: Retry | None = None,
        limits: FleetLimits | None = None,
        warn: Callable[[str], None] = logger.warning,
    ):
        if router and not router.SAYS_VERSIONS:
            raise ConfigError(
                f"{type(router).__name__} takes no inference.router. List servers in inference.url."
            )
        self.publishers = members[0].publishers
        self.context_length = min(client.context_length for client in members)
        self.vocab_size = min(client.vocab_size for client in members)
        for client in members:
            client.together = members[0].together
        self._servers = [Member(client) for client in members]
        self._router = Member(router) if router else None
        self._retry = retry or Retry()
        self._limits = limits or FleetLimits()
        self._upkeep = Upkeep(self._servers, self._router, self._limits, warn)
        self._pool = self._upkeep.pool
        self._names = RequestNames()
        self._homes = Homes()
        self._measured_at = time.monotonic()

    def __str__(self) -> str:
        return f"FleetClient of {', '.join(map(str, self._servers))}"

    @property
    def constrains(self) -> bool:
        return self._servers[0].client.constrains

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self._servers[0].client.check_prompt(prompt_ids, images)
        name = self._names.next(session)
        trip = Trip(session or name)

        async def ask(member: Member) -> Completion:
            before = self._oldest_version(member)
            request_id = f"{name}/a{trip.attempts}"
            completion = await member.client.attempt(prompt_ids, sampling_params, request_id, images)
            self._check_version(member, before, completion)
            return completion

        try:
            return await self._deliver(trip, ask)
        finally:
            if not session:
                self._homes.release(name)

    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        trip = Trip(self._names.next("", "score"))
        try:
            return await self._deliver(trip, lambda member: member.client.score(token_ids, images))
        finally:
            self._homes.release(trip.session)

    async def load(self, weight_ref: WeightRef) -> None:
        await self._upkeep.load(weight_ref)

    async def version(self) -> int:
        return min(await self._upkeep.ask_all(lambda client: client.version()))

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._pool.warn = warn

    def engines(self) -> Sequence[BaseClient]:
        """Return the servers in the pool; the others are verified before they come back."""
        return tuple(member.client for member in self._upkeep.serving())

    async def release(self, session: str) -> None:
        self._names.release(session)
        self._homes.release(session)

    async def pause(self) -> None:
        self._upkeep.paused = True
        await self._upkeep.ask_all(lambda client: client.pause())

    async def resume(self) -> None:
        self._upkeep.paused = False
        await self._upkeep.ask_all(lambda client: client.resume())

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._upkeep.asleep |= set(tags)
        await self._upkeep.ask_all(lambda client: client.sleep(tags))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._upkeep.ask_all(lambda client: client.wake(tags))
        self._upkeep.asleep -= set(tags)

    async def health(self) -> dict[str, Any]:
        """Check each server in the pool; return which are in it, and why the others are not."""
        self._pool.start()
        if not self._upkeep.resting:
            await asyncio.gather(*(self._upkeep.check(member) for member in self._upkeep.serving()))
        out = {str(member): member.reason for member in self._servers if not member.up}
        if not self._upkeep.serving():
            raise EngineError(f"No server is available: {out}.")
        version = self._upkeep.target.version if self._upkeep.target else None
        return {"version": version, "in_pool": [str(member) for member in self._upkeep.serving()], "out": out}

    def metrics(self) -> dict[str, float]:
        """Return the number of servers in the pool, counts of attempts and failures since the start, and the share of the
        time since the last call in which a server had no request.
        """
        now = time.monotonic()
        passed_s, self._measured_at = now - self._measured_at, now
        idle_s = sum(member.idle_s() for member in self._servers) / len(self._servers)
        kinds = ("attempts", "retries", "failures", "doubles", "left", "came_back")
        counts = {f"fleet/{kind}": float(self._pool.counts[kind]) for kind in kinds}
        return {
            "fleet/servers": float(len(self._upkeep.serving())),
            "fleet/moved": float(self._homes.moved),
            "fleet/idle": idle_s / max(passed_s, 1e-9),
            **counts,
        }

    async def disconnect(self) -> None:
        await self._pool.stop()
        await asyncio.gather(*(member.client.disconnect() for member in self._pool.endpoints))

    async def close(self) -> None:
        await self._servers[0].client.together.leave()  # which asks all of their servers
        await self.disconnect()
        await asyncio.gather(*(member.client.close() for member in self._pool.endpoints))

    def _ways(self) -> list[Member]:
        """Return where requests may go now: through the router while it works."""
        return [*([self._router] if self._router and self._router.up else ()), *self._upkeep.serving()]

    async def _deliver(self, trip: Trip, ask: Callable[[Member], Coroutine[Any, Any, T]]) -> T:
        """Return the first result; after a failure, try other servers before the same one again."""
        while True:
            self._pool.start()
            member = await self._next(trip)
            self._pool.counts["attempts"] += 1
            try:
                result = await self._answer(member, ask(member))
            except UnreachableError as error:
                self._failed(member, error)
                # else the server never saw the request
                trip.failures += not isinstance(error, NotConnectedError)
                if trip.failures >= self._retry.attempts:
                    raise
                self._pool.counts["retries"] += 1
            else:
                member.worked()
                return result
            trip.attempts += 1
            trip.tried.append(member)

    async def _answer(self, member: Member, request: Coroutine[Any, Any, T]) -> T:
        """Return a member's answer. A router's refusal is not final, since it may have sent one request id twice."""
        try:
            return await member.run(request)
        except RefusedError as error:
            if member is self._router:
                raise UnreachableError(str(error)) from error
            raise

    async def _next(self, trip: Trip) -> Member:
        """Return the server to try next; wait if all were tried, asked for a pause, or are out."""
        while True:
            ways, now = self._ways(), time.monotonic()
            options = [member for member in ways if member not in trip.tried and member.ready_at <= now]
            if options:
                return options[0] if options[0] is self._router else self._homes.place(trip.session, options)
            if ways:
                asked_s = min(member.ready_at for member in ways) - now
                await asyncio.sleep(self._retry.wait_s(trip.rounds, asked_s))
                trip.rounds += 1
            else:
                await self._pool.wait(self._ways)
            trip.tried.clear()

    def _failed(self, member: Member, error: UnreachableError) -> None:
        self._pool.counts["failures"] += 1
        if isinstance(error, DoubleReplyError):
            self._pool.counts["doubles"] += 1
        if error.retry_after_s > 0:  # it reports that it is busy
            member.ready_at = time.monotonic() + min(error.retry_after_s, self._retry.longest_wait_s)
            return
        if isinstance(error, MovedError):
            return
        member.failures += 1
        damaged = isinstance(error, DamagedReplyError | StaleReplyError)
        if damaged and member is self._router:  # the caretakers find the server
            for server in self._upkeep.serving():
                # Stale weights show in the version, without a checksum.
                server.suspect |= isinstance(error, DamagedReplyError)
                server.poke()
            return
        often = member.failures >= self._limits.failures_in_a_row
        if damaged or often or isinstance(error, NotConnectedError):
            self._upkeep.leave(member, str(error), move=damaged)

    def _oldest_version(self, member: Member) -> int | None:
        """Return the oldest version that a reply to a request sent now may come from."""
        if member is not self._router:
            return member.version
        versions = [server.version for server in self._upkeep.serving()]
        verified = [version for version in versions if version is not None]
        newest = self._upkeep.target.version if self._upkeep.target else None
        return None if len(verified) < len(versions) else min(verified, default=newest)

    def _check_version(self, member: Member, before: int | None, completion: Completion) -> None:
        """Raise unless a reply comes from the verified weights of its server, or from newer ones loaded meanwhile."""
        if completion.finish_reason == "abort":
            raise UnreachableError(f"{member} aborted a request.")
        versions = [version for _, _, version in completion.runs]
        target = self._upkeep.target
        if target is None or before is None:
            return
        newest = target.version + target.held  # another rank may have published the next one meanwhile
        if not before <= min(versions) <= max(versions) <= newest:
            raise StaleReplyError(f"{member} answered with version {versions}, not {before} to {newest}")
