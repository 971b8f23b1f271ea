"""A host of environments: builds them for trainers, plays and scores their episodes, and drops them with their trainer."""

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
from rl4llm.core.base_reward import needs_ground_truth
from rl4llm.core.errors import ConfigError, DataError, EnvError, unknown
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs import RolesEnv
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.rpc import NotFoundError
from rl4llm.extensions.remote.scoring import Scoring
from rl4llm.runtime.threads import in_own_thread

SETUP_TIMEOUT_S = 60.0  # between two parts of a setup
IDLE_S = 2 * 3600.0  # maximum duration of a turn of the policy
LONGEST_SCORE_S = 3600.0  # how long a trainer waits for a reward that has no time limit
TRAINERS_PART = (
    "_run_interaction_loop",
    "_run_episodes",
    "_run_episode",
    "opening",
    "openings",
)
TRAINERS_PART_OF_ROLES = ("_next", "_policys_line", "_opponents_line")


@dataclass(frozen=True, slots=True)
class WantedEnv:
    """A trainer's request: an environment by name, its options, its rewards, and an example row."""

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
    """Implements the calls of `environments.proto`.

    Args:
        classes: the environments on offer, by name.
        make: builds a requested environment, given a directory with the tokenizer's files. May block.
        prompts: ``prompts(name, options, split, limit)`` returns the rows that an environment brings. May block.
        say: receives status lines.
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
        """Names of the environments on offer."""
        return list(self._classes)

    @property
    def played(self) -> int:
        """Number of episodes of the environments that are open."""
        return sum(hosted.played for hosted in self._hosted.values())

    async def hello(self, request: Any) -> Any:
        if request.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"this host uses protocol {wire.PROTOCOL} (rl4llm {__version__}), but the trainer uses protocol "
                f"{request.protocol} (rl4llm {request.version}). Install the same version on both."
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
            async for _ in parts:  # no more messages; the stream ends with the trainer
                pass
        finally:
            del self._hosted[identity]
            for episode in hosted.episodes:
                episode.cancel()
            self._say(
                f"{wanted.name}: its trainer disconnected after {hosted.played} episodes; {len(self._hosted)} open"
            )
            await in_own_thread("rl4llm-env-close", env.close)

    async def play(self, spoken: AsyncIterator[Any]) -> AsyncIterator[Any]:
        said = await _next(spoken, SETUP_TIMEOUT_S)
        hosted = self._hosted.get(said.begin.environment)
        if hosted is None:
            raise NotFoundError("this environment is not open on this host; perhaps the host was restarted")
        sample, task = wire.begun(said, hosted.env.roles), asyncio.current_task()
        assert task is not None  # this runs in a coroutine
        hosted.episodes.add(task)
        try:
            while not said.finished:
                wire.take_said(said, sample)
                yield await _turn(hosted.env, sample)
                said = await _next(spoken, IDLE_S)
            wire.take_said(said, sample)
            await hosted.env._end_safely(sample)
            seats = [seat for seat in sample.seats if seat.policy_spans and not seat.failure]
            # judges get all roles in one batch
            scores = await asyncio.gather(*map(hosted.scoring.score, seats))
            hosted.played += 1
            by_role = {seat.role: found for seat, found in zip(seats, scores, strict=True)}
            yield _answer(hosted.env, sample, scores=by_role)
        finally:
            await hosted.env._end_safely(sample)
            hosted.episodes.discard(task)

    def _known(self, name: str) -> type[BaseMDPEnv]:
        if name not in self._classes:
            raise ConfigError(
                f"{unknown('env.name', name, self._classes)} A host offers the environments in its --env."
            )
        return self._classes[name]

    @staticmethod
    def _offer(name: str, made: type[BaseMDPEnv]) -> Any:
        rewards = json.dumps(list(made.default_rewards))
        return wire.Offer(
            name=name,
            brings_prompts=made.prompts is not None,
            default_rewards=rewards,
            has_roles=issubclass(made, RolesEnv),
        )

    async def _received(self, parts: AsyncIterator[Any], directory: Path) -> WantedEnv:
        """Receive the request, and write the tokenizer's files into the directory."""
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
                raise DataError("a trainer opened an environment without naming it.")

    async def _made(self, wanted: WantedEnv, directory: Path) -> BaseMDPEnv:
        """Build the environment, and close it if the trainer disconnects meanwhile."""
        making = asyncio.ensure_future(
            in_own_thread("rl4llm-env-make", lambda: self._make(wanted, directory))
        )
        try:
            env = await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                (await making).close()
            raise
        check_hostable(wanted.name, type(env), env.opponents)
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
            success_at=env.success_at,
            rewards=[
                wire.Reward(
                    name=item.name,
                    per_turn=item.per_turn,
                    timeout_s=item.score_timeout_s or LONGEST_SCORE_S,
                    needs_ground_truth=needs_ground_truth(item),
                    success_at=item.success_at,
                )
                for item in env.reward_functions
            ],
            **(_roles(env) if isinstance(env, RolesEnv) else {}),
        )


def check_hostable(name: str, made: type[BaseMDPEnv], opponents: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for an environment that does not leave all turns, also those of opponents, to the trainer."""
    roles = issubclass(made, RolesEnv)
    base, parts = (
        (RolesEnv, (*TRAINERS_PART, *TRAINERS_PART_OF_ROLES)) if roles else (BaseMDPEnv, TRAINERS_PART)
    )
    own = [f"{made.__name__}.{part}" for part in parts if getattr(made, part) is not getattr(base, part)]
    own += [f"{made.__name__}.roles"] if len(made.roles) > 1 and not roles else []
    own += [f"{made.__name__}.opponents"] if opponents or made.opponents else []
    if own:
        raise ConfigError(
            f"The environment {name!r} cannot be hosted: {own[0]} takes over work of the trainer, which has the policy. "
            "Only environments with just `respond` can be hosted, and roles without a custom `opening` or opponents of the "
            "class; run this one in the trainer's process."
        )


def _roles(env: RolesEnv) -> dict[str, Any]:
    """Return the properties of an environment in which several roles speak."""
    instructions = {role: env.instructions.get(role, env.instruction) for role in env.roles}
    told = {role: text for role, text in instructions.items() if text is not None}
    return {"roles": env.roles, "frozen": env.frozen, "instructions": told}


async def _turn(env: BaseMDPEnv, sample: SampleState) -> Any:
    """Return the answer to a turn: the environment's replies, or whose turn it is and what that role reads."""
    if not isinstance(env, RolesEnv):
        return _answer(env, sample, await env._respond_safely(sample))
    role, heard = await env._turn_safely(sample) or ("", "")
    return _answer(env, sample, [ChatMessage("user", heard)] if heard else [], role=role)


def _answer(env: BaseMDPEnv, sample: SampleState, replies: Sequence[ChatMessage] = (), **more: Any) -> Any:
    """Return the answer, or the failure of an episode whose answer cannot be sent."""
    try:
        return wire.answer(sample, replies, **more)
    except EnvError as error:
        for seat in sample.seats:
            seat.extras = {}
        sample.fail(f"{type(env).__name__}: {error}", "env/raised")
        return wire.answer(sample)


def _wanted(part: Any) -> WantedEnv:
    options = wire.from_json(part.options, dict, "the options of an environment")
    rewards = [wire.from_json(reward, object, "a reward") for reward in part.rewards]
    row = wire.from_json(part.row, dict, "the example of a prompt")
    return WantedEnv(part.environment, options, rewards, part.seed, row)


def _append(directory: Path, part: Any) -> None:
    if Path(part.name).name != part.name or part.name in ("", ".", ".."):
        raise DataError(f"{part.name!r} is not a file name of a tokenizer.")
    with (directory / part.name).open("ab") as file:
        file.write(part.data)


async def _next(messages: AsyncIterator[Any], timeout_s: float) -> Any:
    """Return the next message. Raises DataError on a timeout and at the end of the stream."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages)
    except TimeoutError:
        raise DataError(f"no message from the trainer for {timeout_s:g} s.") from None
    except StopAsyncIteration:
        raise DataError("the trainer ended the call early.") from None
