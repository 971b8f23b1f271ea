"""The hosts of an environment as a trainer sees them: a pool that keeps the environment open on each host."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rl4llm import __version__
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, HostsDownError, RL4LLMError, unknown
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.rpc import HostChannel, LostError, Talk
from rl4llm.runtime.endpoints import Endpoint, EndpointPool

T = TypeVar("T")
logger = logging.getLogger("rl4llm.envs")

CALL_TIMEOUT_S = 20.0
OPEN_TIMEOUT_S = 300.0  # to load a tokenizer and score the examples of rewards
PROMPTS_TIMEOUT_S = 600.0
GRACE_S = 30.0  # in addition to the host's deadlines
AGAIN_AFTER_S = 0.5
PATIENCE_S, WARN_EVERY_S = 1800.0, 10.0
ATTEMPTS = 3  # to begin an episode


class Hosts:
    """Connections to hosts, in a separate thread and event loop, since they outlive the event loop of a rollout.

    An episode goes to the host with the fewest episodes. A host that is lost gets none until the environment is open
    there again, which is retried all the time.

    Args:
        token: the shared token; "" to read the token file of a host on this machine.
        authority: the certificate file that TLS connections are verified with; None for no encryption.
    """

    def __init__(self, addresses: Sequence[str], token: str = "", *, authority: Path | None = None):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl4llm-env-hosts", daemon=True)
        self._thread.start()
        self.pool: EndpointPool[Link] = self._wait(self._connected(addresses, token, authority))
        self.closed = False
        self._wanted: Any = None
        self._agreed: Any = None  # the properties that the first host reported

    def offer(self, name: str) -> Any:
        """Return the hosts' offer for an environment. Raises ConfigError if the host does not have it."""
        return self._first(lambda link: link.offer(name))

    def prompts(self, request: Any) -> list[dict[str, Any]]:
        """Return the prompts that an environment brings, made on the first available host."""
        return self._first(lambda link: link.prompts(request))

    def open(self, wanted: Any) -> Any:
        """Open an environment on each host, keep it open, and return its properties.

        Waits for hosts only while none is available. Raises ConfigError if one refuses.
        """
        return self._wait(self._open(wanted))

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine of this event loop from another one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def free(self) -> Link:
        """Return the open host with the fewest episodes. Raises HostsDownError if there is none for too long."""
        self.pool.start()
        await self.pool.wait(self.pool.up)
        return min(self.pool.up(), key=lambda link: link.load)

    def close(self) -> None:
        """Disconnect; the hosts drop the environments that were opened."""
        if self.closed:
            return
        self.closed = True
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C; without effect on one that is done

    def _first(self, ask: Callable[[Link], Awaitable[T]]) -> T:
        return self._wait(self.pool.first(ask, LostError, AGAIN_AFTER_S))

    async def _connected(
        self, addresses: Sequence[str], token: str, authority: Path | None
    ) -> EndpointPool[Link]:
        links = [Link(HostChannel(address, token, authority)) for address in addresses]
        return EndpointPool(
            "host of environments",
            links,
            self._keep,
            HostsDownError,
            limit_s=PATIENCE_S,
            warn_every_s=WARN_EVERY_S,
            warn=logger.warning,
        )

    async def _open(self, wanted: Any) -> Any:
        self._wanted = wanted
        self.pool.start()
        for link in self.pool.endpoints:
            await link.tried.wait()
        for link in self.pool.endpoints:
            if link.refusal is not None:
                raise link.refusal
        return (await self.free()).opened

    async def _keep(self, link: Link) -> None:
        """Keep the environment open on one host, and reopen it after errors."""
        while True:
            try:
                await link.hold(self._wanted, self._admit)
            except LostError as error:
                self.lost(link, error)
            except RL4LLMError as error:
                self._refused(link, error)
            link.tried.set()
            await asyncio.sleep(AGAIN_AFTER_S)

    def _admit(self, link: Link) -> None:
        """Raise ConfigError unless the host opened the same environment as the first one, also if it connects later."""
        if self._agreed is None:
            self._agreed = link.opened
        different = [
            field.name
            for field in type(link.opened).DESCRIPTOR.fields
            if field.name != "id" and getattr(link.opened, field.name) != getattr(self._agreed, field.name)
        ]
        if different:
            raise ConfigError(f"env host {link} differs from the first host: {', '.join(different)}.")
        link.refusal = None
        link.tried.set()
        self.pool.admit(link)

    def _refused(self, link: Link, error: RL4LLMError) -> None:
        """Leave the host out until it accepts; before the first episode this stops the run."""
        if link.tried.is_set() and str(error) != link.reason:
            self.pool.warn(f"An environment host gets no episodes: {error}")
        link.up, link.reason, link.refusal = False, str(error), error

    def lost(self, link: Link, error: LostError) -> None:
        """Give no more episodes to a host that did not respond; the environment is reopened there."""
        if link.up:
            self.pool.leave(link, f"{error}; its {link.load} episodes are played again.")
            link.hang_up()
        link.reason = str(error)

    async def _close(self) -> None:
        await self.pool.stop()
        for link in self.pool.endpoints:
            await link.channel.close()


class Link(Endpoint):
    """One host; `load` counts its episodes."""

    def __init__(self, channel: HostChannel):
        super().__init__(channel.address, up=False)
        self.channel = channel
        self.opened: Any = None  # the properties it last reported
        self.tried = asyncio.Event()
        self.refusal: RL4LLMError | None = None
        self._holding: Talk | None = None

    async def offer(self, name: str) -> Any:
        hello = wire.HelloRequest(protocol=wire.PROTOCOL, version=__version__)
        reply = await self.channel.ask("Hello", hello, CALL_TIMEOUT_S, "connecting")
        offers = {offer.name: offer for offer in reply.offers}
        if name not in offers:
            raise ConfigError(f"env host {self}: {unknown('env.name', name, offers)}")
        return offers[name]

    async def prompts(self, request: Any) -> list[dict[str, Any]]:
        rows = self.channel.stream(
            "Prompts", request, PROMPTS_TIMEOUT_S, f"making the prompts of {request.environment!r}"
        )
        return [wire.row_of(row.json) async for row in rows]

    async def hold(self, wanted: Any, opened: Callable[[Link], None]) -> None:
        """Open the environment, call `opened`, and keep it open until the host is lost."""
        name = wanted.environment
        await self.offer(name)
        self._holding = holding = self.channel.hold("Open", wanted)
        try:
            self.opened = await holding.hear(OPEN_TIMEOUT_S, f"opening the environment {name!r}")
            opened(self)
            await holding.hear(None, f"keeping the environment {name!r} open")
        finally:
            holding.end()

    def hang_up(self) -> None:
        """Close the open environment, so that it is opened again."""
        if self._holding is not None:
            self._holding.end()


class HostedEpisode:
    """One episode on one host, which is chosen for the first message.

    A first message goes to another host if that one is lost. Later ones raise LostError: the host knew the state of the
    environment, so the episode fails, and the rollout plays it again from its seed.
    """

    def __init__(self, hosts: Hosts, name: str):
        self._hosts, self._name = hosts, name
        self._link: Link | None = None
        self._talk: Talk | None = None
        self._opened: Any = None
        self._sent = wire.Sent()

    async def ask(self, sample: SampleState, doing: str, *, finished: bool = False) -> Any:
        """Send what is new in the episode, and return the answer. Raises LostError after losing the host."""
        message = wire.update_message(sample, self._sent, finished=finished)
        attempts = 0
        while True:
            attempts += 1
            if self._talk is None:
                self._link = await self._hosts.free()
                self._link.load += 1
                self._opened, self._talk = self._link.opened, self._link.channel.talk("Play")
            try:
                return await self._exchange(self._talk, message, f"{doing} of {self._name!r}")
            except LostError as error:
                if self._link is not None and self._link.opened is self._opened:
                    self._hosts.lost(self._link, error)
                await self.end()
                if attempts == ATTEMPTS or not message.HasField("begin"):
                    raise

    async def end(self) -> None:
        if self._talk is not None and self._link is not None:
            self._talk.end()
            self._talk = None
            self._link.load -= 1

    async def _exchange(self, talk: Talk, message: Any, doing: str) -> Any:
        if message.HasField("begin"):
            message.begin.environment = self._opened.id
        # another batch may come first
        rewards_s = 2 * sum(reward.timeout_s for reward in self._opened.rewards)
        timeout_s = GRACE_S + (rewards_s if message.finished else self._opened.respond_timeout_s)
        await talk.say(message, timeout_s, doing)
        return await talk.hear(timeout_s, doing)
