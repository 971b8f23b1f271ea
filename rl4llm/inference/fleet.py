"""Several servers as one client: groups stay together, what fails moves elsewhere, and only proven servers serve.

A server is in the pool, and gets requests, until something speaks against it: several failures in a row, a bad health
check, another version of the weights than it was proven to hold, a load that failed. It comes back when it is healthy and
its version and checksum are those of the servers in the pool; if they are not, it is given the newest weights first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import chain
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import ConfigError, EngineError, EnginesDownError, RefusedError, StaleWeightsError, UnreachableError
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.inference.member import Homes, Member, MovedError, Patience, StaleReplyError, Trip
from rl4llm.inference.server import DamagedReplyError, DoubleReplyError, RequestNames, ServerClient
from rl4llm.inference.transport import NotConnectedError, Retry

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ask = Callable[[ServerClient], Awaitable[T]]
TOO_SLOW = "it did not tell its health in time"
STOOD_STILL_S = 1.0


class FleetClient(BaseClient):
    """Servers of one kind, started with the same flags, as one client.

        fleet = FleetClient([SGLangClient(url, tokenizer, vocab_size=151936, context_length=4096) for url in urls])

    Args:
        members: one client for each server.
        router: a client of a router in front of them. Requests then go through it, weights still to each server.
        direct: whether requests go to the servers themselves while the router is down.
        retry: how often a request is tried, and how long it waits once it was at every server.
        patience: when a server is out, and how long to wait for one that is in.
        warn: gets a line whenever a server leaves or comes back, and while there is none.
    """

    def __init__(
        self,
        members: Sequence[ServerClient],
        *,
        router: ServerClient | None = None,
        direct: bool = True,
        retry: Retry | None = None,
        patience: Patience | None = None,
        warn: Callable[[str], None] = logger.warning,
    ):
        urls = [client.base_url for client in members]
        if not urls or len(set(urls)) < len(urls):
            raise ConfigError(f"inference.url={urls} is not accepted: one address or more, each of them once.")
        if router and not router.SAYS_VERSIONS:
            raise ConfigError(
                f"inference.router={router.base_url!r} is not accepted for {type(router).__name__}: replies of such "
                "servers do not say which weights they are from. Leave it out; inference.url may be a list of servers."
            )
        self.publishers = members[0].publishers
        self.context_length = min(client.context_length for client in members)
        self.vocab_size = min(client.vocab_size for client in members)
        self._servers = [Member(client) for client in members]
        self._router = Member(router) if router else None
        self._direct = direct or router is None
        self._retry = retry or Retry()
        self._patience = patience or Patience()
        self._warn = warn
        self._names = RequestNames()
        self._homes = Homes()
        self._counts: Counter[str] = Counter()
        self._target: WeightRef | None = None
        self._checksum: str | None = None
        self._paused = False
        self._asleep: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caretakers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._waiting = 0
        self._down_since = self._next_line = 0.0

    def __str__(self) -> str:
        return f"FleetClient of {', '.join(map(str, self._servers))}"

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self._servers[0].client.check_prompt(prompt_ids)
        name = self._names.next(session)
        trip = Trip(session or name)

        async def ask(member: Member) -> Completion:
            before = self._held(member)
            request_id = f"{name}/a{trip.attempts}"
            completion = await member.client.attempt(prompt_ids, sampling_params, request_id)
            self._check_version(member, before, completion)
            return completion

        try:
            return await self._deliver(trip, ask)
        finally:
            if not session:
                self._homes.release(name)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        trip = Trip(self._names.next("", "score"))
        try:
            return await self._deliver(trip, lambda member: member.client.score(token_ids))
        finally:
            self._homes.release(trip.session)

    async def load(self, weight_ref: WeightRef) -> None:
        """Have every server take over the weights; one that cannot leaves the pool, and the others go on.

        A server that is out gets them before it comes back. Raises EngineError when no server took them, and
        StaleWeightsError when servers that say they did hold different weights.
        """
        self._start()
        self._target, self._checksum = weight_ref, None
        first = self._pool() or self._servers
        problems = await self._load_into(first, weight_ref)
        if not self._pool():
            problems += await self._load_into([member for member in self._servers if member not in first], weight_ref)
        if not self._pool():
            refusals = [problem for problem in problems if not isinstance(problem, UnreachableError)]
            if refusals:
                raise EngineError(f"No server could load version {weight_ref.version}. {refusals[0]}") from refusals[0]
            await self._wait(self._pool)
        self._compare()

    async def version(self) -> int:
        return min(await self._ask_all(lambda client: client.version()))

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def engines(self) -> Sequence[BaseClient]:
        """The servers in the pool; those that are out prove their weights before they come back."""
        return tuple(member.client for member in self._pool())

    async def expect(self, session: str) -> None:
        for member in self._servers:
            await member.client.expect(session)

    async def park(self, session: str) -> None:
        for member in self._servers:
            await member.client.park(session)

    async def release(self, session: str) -> None:
        self._names.release(session)
        self._homes.release(session)
        for member in self._servers:
            await member.client.release(session)

    async def pause(self) -> None:
        self._paused = True
        await self._ask_all(lambda client: client.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._ask_all(lambda client: client.resume())

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._asleep |= set(tags)
        await self._ask_all(lambda client: client.sleep(tags))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._ask_all(lambda client: client.wake(tags))
        self._asleep -= set(tags)

    async def health(self) -> dict[str, Any]:
        """Which servers are in the pool, and why the others are not, after asking each that is in."""
        self._start()
        if not self._resting:
            await asyncio.gather(*(self._check(member) for member in self._pool()))
        out = {str(member): member.reason for member in self._servers if not member.in_pool}
        if not self._pool():
            raise EngineError(f"No server can serve: {out}.")
        version = self._target.version if self._target else None
        return {"version": version, "in_pool": [str(member) for member in self._pool()], "out": out}

    def metrics(self) -> dict[str, float]:
        """How many servers are in the pool, and what happened since the start."""
        kinds = ("attempts", "retries", "failures", "doubles", "left", "came_back")
        counts = {f"fleet/{kind}": float(self._counts[kind]) for kind in kinds}
        return {"fleet/servers": float(len(self._pool())), "fleet/moved": float(self._homes.moved), **counts}

    async def disconnect(self) -> None:
        caretakers, self._caretakers, self._loop = self._caretakers, [], None
        for task in caretakers:
            task.cancel()
        await asyncio.gather(*caretakers, return_exceptions=True)
        await asyncio.gather(*(member.client.disconnect() for member in self._everyone()))

    async def close(self) -> None:
        await self.disconnect()
        await asyncio.gather(*(member.client.close() for member in self._everyone()))

    @property
    def _resting(self) -> bool:
        """Whether the servers are paused or asleep on purpose, and not to be asked for their health."""
        return self._paused or bool(self._asleep)

    def _everyone(self) -> list[Member]:
        return [*self._servers, *([self._router] if self._router else [])]

    def _pool(self) -> list[Member]:
        return [member for member in self._servers if member.in_pool]

    def _ways(self) -> list[Member]:
        """Where requests may go now: through the router while there is one that works."""
        if self._router and self._router.in_pool:
            return [self._router, *(self._pool() if self._direct else ())]
        return self._pool() if self._direct else []

    def _start(self) -> None:
        """Have a caretaker for each server in this event loop; one that broke off says here why."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._changed = loop, asyncio.Event()
            for member in self._everyone():
                member.bind()
            self._caretakers = [loop.create_task(self._take_care(member)) for member in self._everyone()]
        for task in self._caretakers:
            if task.done():
                task.result()

    async def _deliver(self, trip: Trip, ask: Callable[[Member], Coroutine[Any, Any, T]]) -> T:
        """The first result; after a failure another server is asked before the same one again."""
        while True:
            self._start()
            member = await self._next(trip)
            self._counts["attempts"] += 1
            try:
                result = await self._answer(member, ask(member))
            except UnreachableError as error:
                self._failed(member, error)
                trip.failures += not isinstance(error, NotConnectedError)  # the server never saw the request
                if trip.failures >= self._retry.attempts:
                    raise
                self._counts["retries"] += 1
            else:
                member.worked()
                return result
            trip.attempts += 1
            trip.tried.append(member)

    async def _answer(self, member: Member, request: Coroutine[Any, Any, T]) -> T:
        """A member's answer; what a router refuses is not refused yet, since it may have sent one id twice by itself."""
        try:
            return await member.run(request)
        except RefusedError as error:
            if member is self._router:
                raise UnreachableError(str(error)) from error
            raise

    async def _next(self, trip: Trip) -> Member:
        """The server to ask next; waits when all were asked, want to be left alone, or are out."""
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
                await self._wait(self._ways)
            trip.tried.clear()

    def _failed(self, member: Member, error: UnreachableError) -> None:
        """What a failed attempt says about its server."""
        self._counts["failures"] += 1
        if isinstance(error, DoubleReplyError):
            self._counts["doubles"] += 1
        if error.retry_after_s > 0:  # busy, by its own account
            member.ready_at = time.monotonic() + min(error.retry_after_s, self._retry.longest_wait_s)
            return
        if isinstance(error, MovedError):
            return
        member.failures += 1
        damaged = isinstance(error, DamagedReplyError | StaleReplyError)
        if damaged and member is self._router:  # which of the servers it was is for their caretakers to find out
            for server in self._pool():
                server.suspect |= isinstance(error, DamagedReplyError)  # what is stale shows without a checksum
                server.poke()
        elif damaged or isinstance(error, NotConnectedError) or member.failures >= self._patience.failures_in_a_row:
            self._leave(member, str(error), move=damaged)

    def _held(self, member: Member) -> int | None:
        """The oldest version that a reply to a request sent now may come from."""
        if member is not self._router:
            return member.version
        versions = [server.version for server in self._pool()]
        known = [version for version in versions if version is not None]
        newest = self._target.version if self._target else None
        return None if len(known) < len(versions) else min(known, default=newest)

    def _check_version(self, member: Member, before: int | None, completion: Completion) -> None:
        """A reply counts when its weights are those the server was proven to hold, or newer ones it was given meanwhile."""
        if completion.finish_reason == "abort":
            raise UnreachableError(f"{member} gave a request up half-way.")
        versions = [version for _, version in completion.versions] or [completion.version]
        if self._target and before is not None and not before <= min(versions) <= max(versions) <= self._target.version:
            raise StaleReplyError(
                f"{member} answered from version {versions} of the weights; it was proven to hold {before}, and the newest "
                f"is {self._target.version}"
            )

    async def _ask_all(self, ask: Ask[T]) -> list[T]:
        """The answers of all servers in the pool; one that does not answer leaves it."""
        self._start()
        while True:
            answers = await asyncio.gather(*(self._ask_one(member, ask) for member in self._pool()))
            found = list(chain.from_iterable(answers))
            if found:
                return found
            await self._wait(self._pool)

    async def _ask_one(self, member: Member, ask: Ask[T]) -> list[T]:
        """Its answer, if there is one."""
        try:
            async with member.lock:  # not in the midst of a health check
                return [await ask(member.client)]
        except UnreachableError as error:
            self._leave(member, str(error), move=True)
            return []

    async def _load_into(self, members: Sequence[Member], weight_ref: WeightRef) -> list[EngineError]:
        found = await asyncio.gather(*(self._load_one(member, weight_ref) for member in members))
        return [problem for problem in found if problem is not None]

    async def _load_one(self, member: Member, weight_ref: WeightRef) -> EngineError | None:
        async with member.lock:
            try:
                await member.client.load(weight_ref)
                member.checksum = await member.client.checksum()
            except EngineError as error:
                self._leave(member, str(error), move=True)
                return error
            member.version = weight_ref.version
            self._admit(member)
            return None

    def _compare(self) -> None:
        """Most servers in the pool hold the same weights; those that hold others leave it."""
        pool = self._pool()
        if not pool:
            return
        [(checksum, most), *_] = Counter(member.checksum for member in pool).most_common()
        if 2 * most <= len(pool):
            held = "; ".join(f"{member}: {member.checksum}" for member in pool)
            raise StaleWeightsError(
                f"The servers report version {pool[0].version} but hold different weights, and none are those of most of "
                f"them ({held}). Start all servers with the same flags (dtype, parallelism); else look for damage."
            )
        self._checksum = checksum
        for member in pool:
            if member.checksum != checksum:
                self._leave(member, "its weights differ from those of the other servers", move=True)

    def _leave(self, member: Member, reason: str, *, move: bool = False) -> None:
        """A server gets no more requests; with `move`, those that it has go elsewhere."""
        if member.in_pool:
            member.in_pool, member.reason = False, reason
            member.strikes += 1
            self._counts["left"] += 1
            self._warn(f"Server {member} leaves the pool of {len(self._servers)}: {reason}")
        if move:
            member.give_up_requests()
        member.poke()

    def _admit(self, member: Member) -> None:
        if not member.in_pool:
            self._counts["came_back"] += 1
            self._warn(f"Server {member} is back in the pool of {len(self._servers)}.")
        member.in_pool, member.suspect, member.failures, member.ready_at = True, False, 0, 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, serving: Callable[[], Sequence[Member]]) -> None:
        """Until there is a server again; raises EnginesDownError when that takes too long."""
        now = time.monotonic()
        if not self._waiting:
            self._down_since = self._next_line = now
        self._waiting += 1
        try:
            while not serving():
                await self._wait_for_line()
        finally:
            self._waiting -= 1

    async def _wait_for_line(self) -> None:
        """Until the pool changes or the next line is due, which the first of those who wait says."""
        now, patience = time.monotonic(), self._patience
        end = self._down_since + patience.all_down_limit_s
        causes = "; ".join(f"{member}: {member.reason}" for member in self._everyone() if not member.in_pool)
        if now >= end:
            raise EnginesDownError(
                f"No server could serve for {patience.all_down_limit_s:g} s ({causes}). Start them again; the same command "
                "then goes on with the run."
            )
        if now >= self._next_line:
            self._next_line = now + patience.warn_every_s
            waited_s, limit_s = now - self._down_since, patience.all_down_limit_s
            self._warn(
                f"No server can serve; waiting since {waited_s:.0f} s, at most {limit_s:g} s. Start one, and this goes on. "
                f"{causes}"
            )
        changed = self._changed
        try:
            async with asyncio.timeout(min(end, self._next_line) - now):
                await changed.wait()
        except TimeoutError:
            return

    async def _take_care(self, member: Member) -> None:
        """Look after one server for as long as the event loop runs."""
        while True:
            if self._resting:
                await member.wait(self._patience.check_every_s)
            elif member.in_pool:
                await self._check(member)
                if member.in_pool:
                    await member.wait(self._patience.check_every_s)
                if member.in_pool:  # it stayed; a router's replies do not say whose they are
                    member.strikes = 0
            else:
                await asyncio.sleep(self._patience.rest.wait_s(max(0, member.strikes - 1)))
                await self._bring_back(member)

    async def _check(self, member: Member) -> None:
        """Ask a server in the pool for its health and its version; one that fails leaves, and its requests move."""
        replies = member.replies
        async with member.lock:
            try:
                async with asyncio.timeout(self._patience.check_deadline_s) as deadline:
                    await self._ask_health(member)
                    if member.suspect or member.version is not None:
                        await self._check_held(member)
            except StaleWeightsError as error:
                self._leave(member, str(error), move=True)
            except (EngineError, TimeoutError) as error:
                now = asyncio.get_running_loop().time()
                late_s = now - (deadline.when() or now)  # the loop stood still: this process trained
                if member.replies == replies and not self._resting and late_s < STOOD_STILL_S:
                    self._leave(member, str(error) or TOO_SLOW, move=True)

    async def _ask_health(self, member: Member) -> None:
        """A router knows of no weights; that it answers is all there is to ask."""
        if member is self._router:
            await member.client.http.ping("/health")
        else:
            await member.client.health()

    async def _check_held(self, member: Member) -> None:
        version = await member.client.version()
        known = {member.version, self._target.version} if self._target and self._target.held else {member.version}
        if member.version is not None and version not in known:  # another rank gives it versions while this one looks away
            raise StaleWeightsError(f"it reports version {version} of the weights, and was proven to hold {member.version}")
        if member.suspect and self._checksum is not None and await member.client.checksum() != self._checksum:
            raise StaleWeightsError(f"its weights of version {version} have changed")
        member.suspect = False

    async def _bring_back(self, member: Member) -> None:
        """Have a server that is out prove itself; what it was not given, it is given first."""
        proves = False
        async with member.lock:
            try:
                await member.client.http.knock(deadline_s=self._patience.connect_s)
                async with asyncio.timeout(self._patience.check_deadline_s):
                    if member is not self._router:
                        await member.client.resume()  # a load that failed, or a trainer that died, may have left it paused
                    await self._ask_health(member)
                target = self._target
                if target is not None and member is not self._router:
                    proves = not target.held  # else another rank loads them, and this one has only to wait
                    await self._prove(member, target)
                if target is self._target and not member.in_pool:
                    self._admit(member)
            except (EngineError, TimeoutError) as error:
                member.strikes += proves
                member.reason = str(error) or TOO_SLOW

    async def _prove(self, member: Member, target: WeightRef) -> None:
        if not await self._holds(member, target, loaded=False):
            await member.client.load(target)
            if not await self._holds(member, target, loaded=True):
                raise StaleWeightsError(
                    f"it loaded version {target.version} again, and its weights still differ from those of the other servers"
                )
        member.version = target.version

    async def _holds(self, member: Member, target: WeightRef, *, loaded: bool) -> bool:
        """Whether a server has the weights that are proven; where none are yet, those that it just loaded count."""
        if await member.client.version() != target.version:
            return False
        member.checksum = await member.client.checksum()
        if loaded and self._checksum is None:
            return True
        return member.checksum == self._checksum and (loaded or member.checksum is not None)
