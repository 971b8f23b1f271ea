"""The hosts of an environment as a trainer sees them: kept open, chosen between, waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rl4llm import __version__
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, EnvError, HostsDownError, RL4LLMError, unknown
from rl4llm.core.types import ChatMessage
from rl4llm.envs.remote import wire
from rl4llm.envs.remote.rpc import Channel, LostError, Talk
from rl4llm.rewards.ask import Broken

T = TypeVar("T")
logger = logging.getLogger("rl4llm.envs")

CALL_TIMEOUT_S = 20.0
OPEN_TIMEOUT_S = 300.0  # to load a tokenizer and to try rewards on their examples
PROMPTS_TIMEOUT_S = 600.0
GRACE_S = 30.0  # beside what the host itself allows
AGAIN_AFTER_S = 0.5
MOVES = 2
CHUNK_BYTES = 1024**2


class Hosts:
    """Connections to hosts, in a thread and an event loop of their own, as they outlive each rollout's.

    Episodes go to the host with the fewest; one that is lost gets none until it is open again, which is tried all the time.
    While there is none everybody waits, with a line every `say_every_s`, and after `patience_s` HostsDownError says why.

    Args:
        addresses: host:port of each.
        token: what they want to be shown; "" for nothing.
    """

    def __init__(self, addresses: Sequence[str], token: str = "", *, patience_s: float = 1800.0, say_every_s: float = 10.0):
        self._patience_s, self._say_every_s, self._said = patience_s, say_every_s, time.monotonic()
        self._warn: Callable[[str], None] = logger.warning
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl4llm-env-hosts", daemon=True)
        self._thread.start()
        self._changed = asyncio.Event()
        self._links: list[Link] = self._wait(self._connected(addresses, token))
        self._keeping: list[asyncio.Task[None]] = []
        self.closed = False

    def offer(self, name: str) -> Any:
        """What the hosts say about an environment; raises ConfigError when one of them has none of that name."""
        return self._wait(self._offer(name))

    def prompts(self, name: str, options: Mapping[str, Any], split: str, limit: int | None) -> list[dict[str, Any]]:
        """The prompts that an environment brings, made on the first host that is there."""
        text = wire.to_json(dict(options), "env: its options")
        request = wire.PromptsRequest(environment=name, options=text, split=split, limit=limit)
        return self._wait(self._patiently(lambda link: link.prompts(request)))

    def open(
        self,
        name: str,
        options: Mapping[str, Any],
        rewards: Sequence[Any],
        seed: int,
        row: Mapping[str, Any],
        tokenizer: Path,
    ) -> Any:
        """Open an environment on each host, with the files of a tokenizer, and keep it open; what they say of it.

        `row` is an example of its prompts. Hosts that are not there yet are awaited only while none is. Raises ConfigError
        when one refuses.
        """
        wanted = wire.Wanted(
            environment=name,
            options=wire.to_json(dict(options), "env: its options"),
            rewards=[wire.to_json(reward, "rewards: one of them") for reward in rewards],
            seed=seed,
            row=wire.to_json(dict(row), "data: its first row"),
        )
        return self._wait(self._open(list(_parts(wanted, tokenizer))))

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Where to send lines that the user should see; before that they are logged."""
        self._warn = warn

    def say(self, text: str) -> None:
        """Tell the user."""
        self._warn(text)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of something that talks with hosts, for another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def free(self) -> Link:
        """The open host with the fewest episodes."""
        return await self._patiently(self._if_open, key=lambda link: link.episodes)

    def close(self) -> None:
        """Hang up; the hosts forget what was opened."""
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
        except BaseException:
            future.cancel()
            raise

    async def _connected(self, addresses: Sequence[str], token: str) -> list[Link]:
        agreed: list[Any] = []
        return [Link(Channel(address, token), agreed, self.say) for address in addresses]

    async def _offer(self, name: str) -> Any:
        return await self._patiently(lambda link: link.offer(name))

    async def _open(self, parts: Sequence[Any]) -> Any:
        self._keeping = [asyncio.create_task(self._keep(link, parts)) for link in self._links]
        for link in self._links:
            await link.tried.wait()
        for link in self._links:
            if link.refusal is not None:
                raise link.refusal
        return (await self.free()).opened

    async def _patiently(self, ask: Callable[[Link], Any], key: Callable[[Link], Any] | None = None) -> Any:
        """What the first host that can gives; those that are lost are asked again until the patience is over."""
        start = time.monotonic()
        while True:
            for link in sorted(self._links, key=key) if key else self._links:
                try:
                    return await ask(link)
                except LostError as error:
                    link.trouble = str(error)
            self._complain(time.monotonic() - start)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_AFTER_S):
                    await self._changed.wait()

    def _complain(self, waited_s: float) -> None:
        """Say what is waited for, once for all who wait."""
        troubles = "; ".join(link.trouble for link in self._links)
        if waited_s > self._patience_s:
            raise HostsDownError(f"No host of environments could be used for {self._patience_s:g} s: {troubles}.")
        if time.monotonic() - self._said >= self._say_every_s:
            self._said = time.monotonic()
            self.say(f"Waiting for a host of environments, {waited_s:.0f} s so far: {troubles}.")

    async def _if_open(self, link: Link) -> Link:
        if link.opened is None:
            raise LostError(link.trouble or f"env host {link.address} is not open yet")
        return link

    async def _keep(self, link: Link, parts: Sequence[Any]) -> None:
        """Hold the environment open on one host, again and again."""
        while True:
            try:
                await link.hold(parts, self._changed.set)
            except LostError as error:
                link.trouble = str(error)
            except RL4LLMError as error:
                link.refused(error)
            link.tried.set()
            await asyncio.sleep(AGAIN_AFTER_S)

    async def _close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for link in self._links:
            await link.channel.close()


class Link:
    """One host."""

    def __init__(self, channel: Channel, agreed: list[Any], say: Callable[[str], None]):
        self.channel, self._agreed, self._say = channel, agreed, say
        self.opened: Any = None  # while the environment is open there
        self.episodes = 0
        self.trouble = ""
        self.tried = asyncio.Event()
        self.refusal: RL4LLMError | None = None
        self._holding: Talk | None = None
        self._lost: set[str] = set()

    @property
    def address(self) -> str:
        return self.channel.address

    async def offer(self, name: str) -> Any:
        hello = wire.HelloRequest(protocol=wire.PROTOCOL, version=__version__)
        reply = await self.channel.ask("Hello", hello, CALL_TIMEOUT_S, "said hello")
        if reply.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"env host {self.address} speaks protocol {reply.protocol} (rl4llm {reply.version}), this is protocol "
                f"{wire.PROTOCOL} (rl4llm {__version__}). Install the same version on both."
            )
        offers = {offer.name: offer for offer in reply.offers}
        if name not in offers:
            offered = f"{unknown('env.name', name, offers)} A host offers what its --env names."
            raise ConfigError(f"env host {self.address}: {offered}")
        return offers[name]

    async def prompts(self, request: Any) -> list[dict[str, Any]]:
        rows = self.channel.stream("Prompts", request, PROMPTS_TIMEOUT_S, f"made the prompts of {request.environment!r}")
        return [json.loads(row.json) async for row in rows]

    async def hold(self, parts: Sequence[Any], changed: Callable[[], None]) -> None:
        """Open the environment and keep it so until the host is lost."""
        name = parts[0].wanted.environment
        await self.offer(name)
        self._holding = holding = self.channel.talk("Open")
        try:
            for part in parts:
                await holding.say(part, CALL_TIMEOUT_S, f"got the tokenizer of {name!r}")
            opened = await holding.hear(OPEN_TIMEOUT_S, f"opened the environment {name!r}")
            self._check_same(opened)
            self.opened, self.refusal, self.trouble = opened, None, ""
            self.tried.set()
            changed()
            await holding.hear(None, f"held the environment {name!r}")
        finally:
            self.opened = None
            holding.end()

    def refused(self, error: RL4LLMError) -> None:
        """Leave the host out until it accepts; before the first episode this stops the run."""
        if self.tried.is_set() and str(error) != self.trouble:
            self._say(f"A host of environments gets no episodes: {error}")
        self.trouble, self.refusal = str(error), error

    def lost(self, opened: Any, error: LostError) -> None:
        """No more episodes for an environment that did not answer; it is opened anew."""
        if opened.id not in self._lost:
            self._lost.add(opened.id)
            self._say(f"A host of environments is lost; its {self.episodes} episodes go on elsewhere: {error}.")
        if self.opened is opened and self._holding is not None:
            self.opened = None
            self._holding.end()

    def _check_same(self, opened: Any) -> None:
        """All hosts, also those that come later, must have what the first one opened."""
        if not self._agreed:
            self._agreed.append(opened)
        different = [
            field.name
            for field in type(opened).DESCRIPTOR.fields
            if field.name != "id" and getattr(opened, field.name) != getattr(self._agreed[0], field.name)
        ]
        if different:
            changed = ", ".join(different)
            raise ConfigError(f"env host {self.address} opened another environment than the first host: other {changed}.")


class Episode:
    """One episode on one host, which is chosen when there is something to say.

    When that host is lost, the episode goes on on another: the turns that were taken are told again, from the same seed, and
    must be answered as before. What the policy sampled stays as it is. After `MOVES` of that the host counts as lost.
    """

    def __init__(self, hosts: Hosts, name: str):
        self._hosts, self._name = hosts, name
        self._link: Link | None = None
        self._talk: Talk | None = None
        self._opened: Any = None
        self._sent = wire.Sent()
        self._told: list[tuple[Any, Any]] = []  # what was said, and the answers

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        """The environment's next messages; raises LostError when hosts go away again and again."""
        answer = await self._ask(wire.said(sample, self._sent), "answered a turn")
        return wire.take_answer(answer, sample)

    async def score(self, sample: SampleState) -> dict[str, list[float] | Broken]:
        """What the rewards give, by name, up to the first that gives nothing; the host is done with the episode then."""
        said = wire.said(sample, self._sent, finished=sample.stop_reason or "done")
        answer = await self._ask(said, "scored an episode")
        wire.take_answer(answer, sample)
        return {score.reward: wire.take_score(score) for score in answer.scores}

    async def end(self) -> None:
        """Hang up."""
        if self._talk is not None and self._link is not None:
            self._talk.end()
            self._talk = None
            self._link.episodes -= 1

    async def _ask(self, said: Any, doing: str) -> Any:
        for move in range(MOVES + 1):
            try:
                answer = await self._exchange(await self._begun(), said, doing)
            except LostError as error:
                if self._link is not None:
                    self._link.lost(self._opened, error)
                await self.end()
                if move == MOVES:
                    raise
            else:
                self._told.append((said, answer))
                return answer
        raise AssertionError("unreachable")

    async def _begun(self) -> Talk:
        """The talk with a host that knows the episode so far; EnvError when it answers otherwise than the one before."""
        if self._talk is not None:
            return self._talk
        self._link = await self._hosts.free()
        self._link.episodes += 1
        self._opened = self._link.opened
        self._talk = talk = self._link.channel.talk("Play")
        for turn, (said, answered) in enumerate(self._told, 1):
            answer = await self._exchange(talk, said, "took over an episode")
            if (answer.messages, answer.turn_rewards) != (answered.messages, answered.turn_rewards):
                where = f"env host {self._link.address}, while it took over an episode of {self._name!r}"
                raise EnvError(
                    f"{where}: it answered turn {turn} otherwise than the host that is lost, so the answer depends on more "
                    "than the episode's seed"
                )
        return talk

    async def _exchange(self, talk: Talk, said: Any, doing: str) -> Any:
        if said.HasField("begin"):
            said.begin.environment = self._opened.id
        rewards_s = 2 * sum(reward.timeout_s for reward in self._opened.rewards)  # there may be a batch before it
        timeout_s = GRACE_S + (rewards_s if said.finished else self._opened.respond_timeout_s)
        doing = f"{doing} of {self._name!r}"
        await talk.say(said, timeout_s, doing)
        return await talk.hear(timeout_s, doing)


def _parts(wanted: Any, tokenizer: Path) -> Iterator[Any]:
    yield wire.OpenRequest(wanted=wanted)
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        data = file.read_bytes()
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            yield wire.OpenRequest(file=wire.FilePart(name=file.name, data=data[start : start + CHUNK_BYTES]))
    yield wire.OpenRequest(complete=True)
