"""A host of environments: makes them, plays its side of their episodes, scores them, and forgets them with their trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl4llm import __version__
from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import ConfigError, DataError, EnvError, unknown
from rl4llm.core.threads import in_own_thread
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.remote import wire
from rl4llm.envs.remote.rpc import NotFoundError
from rl4llm.envs.remote.scoring import Scoring

SETUP_TIMEOUT_S = 60.0  # between two parts of a setup
IDLE_S = 2 * 3600.0  # a turn of the policy may take long, but not so long
LONGEST_SCORE_S = 3600.0  # that a trainer waits for a reward without a limit of its own
TRAINERS_PART = ("_run_interaction_loop", "_run_episodes", "_run_episode", "_run_turns", "opening", "openings")


@dataclass(frozen=True, slots=True)
class WantedEnv:
    """What a trainer asks for: an environment by name, its options, its rewards, and an example of its prompts."""

    name: str
    options: Mapping[str, Any]
    rewards: Sequence[Any]
    seed: int
    row: Mapping[str, Any]


@dataclass(slots=True)
class _Hosted:
    """An environment that a trainer opened."""

    env: BaseMDPEnv
    scoring: Scoring
    played: int = 0
    episodes: set[asyncio.Task[Any]] = field(default_factory=set)


class EnvHost:
    """What the calls of `environments.proto` do.

    Args:
        classes: the environments that may be asked for, by name.
        make: builds one; it gets what is wanted and a directory with the tokenizer's files. May block.
        prompts: ``prompts(name, options, split, limit)``, the rows that an environment brings. May block.
        say: is told in a sentence what happens.
    """

    def __init__(
        self,
        classes: Mapping[str, type[BaseMDPEnv]],
        make: Callable[[WantedEnv, Path], BaseMDPEnv],
        prompts: Callable[[str, Mapping[str, Any], str, int | None], Sequence[Mapping[str, Any]]],
        say: Callable[[str], None] = lambda text: None,
    ):
        for name, made in classes.items():
            check_hostable(name, made)
        self._classes, self._make, self._prompts, self._say = classes, make, prompts, say
        self._hosted: dict[str, _Hosted] = {}

    @property
    def names(self) -> list[str]:
        """Of the environments on offer."""
        return list(self._classes)

    @property
    def played(self) -> int:
        """Episodes of the environments that are open now."""
        return sum(hosted.played for hosted in self._hosted.values())

    async def hello(self, request: Any) -> Any:
        if request.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"this host speaks protocol {wire.PROTOCOL} (rl4llm {__version__}), the trainer protocol {request.protocol} "
                f"(rl4llm {request.version}). Install the same version on both."
            )
        offers = [self._offer(name, made) for name, made in self._classes.items()]
        return wire.HelloReply(protocol=wire.PROTOCOL, version=__version__, offers=offers)

    async def prompts(self, request: Any) -> AsyncIterator[Any]:
        self._known(request.environment)
        options = wire.from_json(request.options, dict, "the options of an environment")
        limit = request.limit if request.HasField("limit") else None
        rows = await in_own_thread(
            "rl4llm-env-prompts", lambda: self._prompts(request.environment, options, request.split, limit)
        )
        for number, row in enumerate(rows):
            yield wire.Row(json=wire.to_json(dict(row), f"prompt {number} of {request.environment!r}"))

    async def open(self, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        with tempfile.TemporaryDirectory(prefix="rl4llm-env-") as directory:
            wanted = await self._received(parts, Path(directory))
            env = await self._made(wanted, Path(directory))
        identity, hosted = secrets.token_hex(16), _Hosted(env, Scoring(env.reward_functions))
        self._hosted[identity] = hosted
        self._say(f"{wanted.name}: opened by a trainer; {len(self._hosted)} open")
        try:
            yield self._opened(identity, env)
            async for _ in parts:  # nothing comes; it ends with the trainer
                pass
        finally:
            del self._hosted[identity]
            for episode in hosted.episodes:
                episode.cancel()
            self._say(f"{wanted.name}: its trainer is gone after {hosted.played} episodes; {len(self._hosted)} open")
            await in_own_thread("rl4llm-env-close", env.close)

    async def play(self, spoken: AsyncIterator[Any]) -> AsyncIterator[Any]:
        said = await _next(spoken, SETUP_TIMEOUT_S)
        hosted = self._hosted.get(said.begin.environment)
        if hosted is None:
            raise NotFoundError("this environment is not open here; perhaps the host was started again")
        sample, task = wire.begun(said), asyncio.current_task()
        assert task is not None  # it is a coroutine that gets here
        hosted.episodes.add(task)
        try:
            while not said.finished:
                wire.take_said(said, sample)
                replies = await hosted.env._respond_safely(sample)
                yield _answer(hosted.env, sample, replies)
                said = await _next(spoken, IDLE_S)
            wire.take_said(said, sample)
            sample.finish(said.finished)
            hosted.env.end_episode(sample)
            scores = await hosted.scoring.score(sample)
            hosted.played += 1
            yield _answer(hosted.env, sample, scores=[wire.score(name, value) for name, value in scores.items()])
        finally:
            hosted.env.end_episode(sample)
            hosted.episodes.discard(task)

    def _known(self, name: str) -> type[BaseMDPEnv]:
        if name not in self._classes:
            raise ConfigError(f"{unknown('env.name', name, self._classes)} A host offers what its --env names.")
        return self._classes[name]

    @staticmethod
    def _offer(name: str, made: type[BaseMDPEnv]) -> Any:
        rewards = json.dumps(list(made.default_rewards))
        return wire.Offer(name=name, brings_prompts=made.prompts is not None, default_rewards=rewards)

    async def _received(self, parts: AsyncIterator[Any], directory: Path) -> WantedEnv:
        """What is wanted; the tokenizer's files lie in the directory then."""
        wanted = None
        while True:
            part = await _next(parts, SETUP_TIMEOUT_S)
            kind = part.WhichOneof("part")
            if kind == "wanted":
                self._known(part.wanted.environment)
                wanted = _wanted(part.wanted)
            elif kind == "file":
                _append(directory, part.file)
            elif wanted is not None:
                return wanted
            else:
                raise DataError("a trainer opened an environment without saying which.")

    async def _made(self, wanted: WantedEnv, directory: Path) -> BaseMDPEnv:
        """The environment, closed again when the trainer goes away before it is made."""
        making = asyncio.ensure_future(in_own_thread("rl4llm-env-make", lambda: self._make(wanted, directory)))
        try:
            env = await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                (await making).close()
            raise
        check_hostable(wanted.name, type(env))
        return env

    @staticmethod
    def _opened(identity: str, env: BaseMDPEnv) -> Any:
        turn = env.turn_params(SamplingParams())
        return wire.Opened(
            id=identity,
            max_steps=env.max_steps,
            continue_truncated=env.continue_truncated,
            reply_roles=env.reply_roles,
            tool_schemas=[json.dumps(schema) for schema in env.tool_schemas or ()],
            respond_timeout_s=env.respond_timeout_s,
            stop=turn.stop,
            stop_token_ids=turn.stop_token_ids,
            rewards=[
                wire.Reward(name=item.name, per_turn=item.per_turn, timeout_s=item.score_timeout_s or LONGEST_SCORE_S)
                for item in env.reward_functions
            ],
        )


def check_hostable(name: str, made: type[BaseMDPEnv]) -> None:
    """Raises ConfigError for an environment that does not leave the policy's turns to the trainer."""
    own = [f"{made.__name__}.{part}" for part in TRAINERS_PART if getattr(made, part) is not getattr(BaseMDPEnv, part)]
    own += [f"roles {', '.join(made.roles)}"] if len(made.roles) > 1 else []
    if own:
        raise ConfigError(
            f"The environment {name!r} cannot be hosted: with {own[0]} it does a part of what the trainer does, which has "
            "the policy. Environments with `respond` alone can; run this one in the trainer's process."
        )


def _answer(env: BaseMDPEnv, sample: SampleState, replies: Sequence[ChatMessage] = (), scores: Sequence[Any] = ()) -> Any:
    """The answer, or the failure of an episode whose answer cannot be sent."""
    try:
        return wire.answer(sample, replies, scores)
    except EnvError as error:
        sample.extras = {}
        sample.fail(f"{type(env).__name__}: {error}", "env/raised")
        return wire.answer(sample)


def _wanted(part: Any) -> WantedEnv:
    options = wire.from_json(part.options, dict, "the options of an environment")
    rewards = [wire.from_json(reward, object, "a reward") for reward in part.rewards]
    row = wire.from_json(part.row, dict, "the example of a prompt")
    return WantedEnv(part.environment, options, rewards, part.seed, row)


def _append(directory: Path, part: Any) -> None:
    if Path(part.name).name != part.name or part.name in ("", ".", ".."):
        raise DataError(f"{part.name!r} is no name of a tokenizer's file.")
    with (directory / part.name).open("ab") as file:
        file.write(part.data)


async def _next(messages: AsyncIterator[Any], timeout_s: float) -> Any:
    """The next message; DataError when none comes in time, or no more at all."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages)
    except TimeoutError:
        raise DataError(f"the trainer said nothing for {timeout_s:g} s.") from None
    except StopAsyncIteration:
        raise DataError("the trainer ended the call in the middle of it.") from None
