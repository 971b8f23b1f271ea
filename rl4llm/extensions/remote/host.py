"""A host of environments: builds them for trainers, plays and scores their episodes, and drops them with their trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl4llm import __version__
from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.environments import Provided, check_env_options, make_env, make_prompts, make_rewards
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, SampleState
from rl4llm.core.base_reward import needs_ground_truth
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs import ENVIRONMENTS, RolesEnv
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.rpc import LostError
from rl4llm.rewards import add, check_examples
from rl4llm.rewards.ask import SLOW_AFTER_S, Broken, Patience, ask
from rl4llm.runtime.threads import in_own_thread

BEGIN_TIMEOUT_S = 60.0  # to the first message of an episode
IDLE_S = 2 * 3600.0  # maximum duration of a turn of the policy
LONGEST_SCORE_S = 3600.0  # how long a trainer waits for a reward that has no time limit
Scores = dict[str, list[float] | Broken]
TRAINERS_PART = (
    "_run_interaction_loop", "_run_episodes", "_run_episode", "opening", "openings", "_next", "_policys_line",
    "_opponents_line",
)  # fmt: skip


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
        names: the environments on offer, registered ones or ``package.module:Class``.
        sandbox: creates the sandbox for programs of the policy; each trainer has a separate one, which ends with it.
    """

    def __init__(
        self, names: Sequence[str], sandbox: Callable[[], Any], say: Callable[[str], None] = lambda text: None
    ):
        self._classes = {name: ENVIRONMENTS[name] for name in names}
        for name, env_class in self._classes.items():
            check_hostable(name, env_class)
        self._sandbox, self._say = sandbox, say
        self._hosted: dict[str, _Hosted] = {}

    async def hello(self, request: Any) -> Any:
        if request.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"this host has rl4llm {__version__} with protocol {wire.PROTOCOL}, the trainer {request.version} with "
                f"{request.protocol}. Install the same version on both."
            )
        offers = [
            wire.Offer(
                name=name,
                brings_prompts=env_class.prompts is not None,
                default_rewards=json.dumps(list(env_class.default_rewards)),
                has_roles=issubclass(env_class, RolesEnv),
            )
            for name, env_class in self._classes.items()
        ]
        return wire.HelloReply(protocol=wire.PROTOCOL, version=__version__, offers=offers)

    async def prompts(self, request: Any) -> AsyncIterator[Any]:
        rows = await in_own_thread("rl4llm-env-prompts", lambda: self._prompts(request))
        for number, row in enumerate(rows):
            yield wire.Row(json=wire.row_json(row, f"prompt {number} of {request.environment!r}"))

    async def open(self, request: Any) -> AsyncIterator[Any]:
        name = request.environment
        env = await self._build(request)
        identity, hosted = secrets.token_hex(16), _Hosted(env, Scoring(env.reward_functions))
        self._hosted[identity] = hosted
        self._say(f"{name}: opened by a trainer; {len(self._hosted)} open")
        try:
            yield self._opened(identity, env)
            await asyncio.Event().wait()  # the call is cancelled when the trainer ends
        finally:
            del self._hosted[identity]
            for episode in hosted.episodes:
                episode.cancel()
            self._say(
                f"{name}: its trainer disconnected after {hosted.played} episodes; {len(self._hosted)} open"
            )
            await in_own_thread("rl4llm-env-close", env.close)

    async def play(self, spoken: AsyncIterator[Any]) -> AsyncIterator[Any]:
        message = await _next(spoken, BEGIN_TIMEOUT_S)
        hosted = self._hosted.get(message.begin.environment)
        if hosted is None:
            raise LostError("this environment is not open on this host; perhaps the host was restarted")
        sample, task = wire.new_sample(message, hosted.env.roles), asyncio.current_task()
        assert task is not None  # this runs in a coroutine
        hosted.episodes.add(task)
        try:
            while not message.finished:
                wire.apply_update(message, sample)
                yield await _turn(hosted.env, sample)
                message = await _next(spoken, IDLE_S)
            wire.apply_update(message, sample)
            await hosted.env._end_safely(sample)
            seats = [seat for seat in sample.seats if seat.policy_spans and not seat.failure]
            # judges get all roles in one batch
            scores = await asyncio.gather(*map(hosted.scoring.score, seats))
            hosted.played += 1
            roles = (seat.role for seat in seats)
            yield wire.answer(sample, scores=dict(zip(roles, scores, strict=True)))
        finally:
            await hosted.env._end_safely(sample)
            hosted.episodes.discard(task)

    def _prompts(self, request: Any) -> Sequence[Mapping[str, Any]]:
        """Return the rows that an environment brings. May block."""
        limit = request.limit if request.HasField("limit") else None
        env_class = self._classes[request.environment]
        return make_prompts(env_class, json.loads(request.options), request.split, limit)

    def _make(self, request: Any) -> BaseMDPEnv:
        """Build an environment for one trainer. Raises an RL4LLMError if it cannot work. May block."""
        env_class, options = self._classes[request.environment], json.loads(request.options)
        check_env_options(env_class, options)
        provided = Provided({"sandbox": self._sandbox})
        rewards = make_rewards(list(map(json.loads, request.rewards)), provided)
        check_examples(rewards)
        return make_env(
            env_class,
            options,
            provided,
            dataset=[wire.row_of(request.row)],
            tokenizer=_tokenizer(request.tokenizer),
            reward_functions=rewards,
            batch_size=1,
            group_size=1,
            seed=request.seed,
            reward_transform_fn=add,  # the trainer combines them
        )

    async def _build(self, request: Any) -> BaseMDPEnv:
        """Build the environment, and close it if the trainer disconnects meanwhile."""
        building = asyncio.ensure_future(in_own_thread("rl4llm-env-make", lambda: self._make(request)))
        try:
            env = await asyncio.shield(building)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                (await building).close()
            raise
        check_hostable(request.environment, type(env), env.opponents)
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
            **_roles(env),
        )


def check_hostable(
    name: str, env_class: type[BaseMDPEnv], opponents: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError for an environment that does not leave all turns, also those of opponents, to the trainer."""
    base = RolesEnv if issubclass(env_class, RolesEnv) else BaseMDPEnv
    own = {part: getattr(base, part) for part in TRAINERS_PART if hasattr(base, part)}
    parts = [part for part, method in own.items() if getattr(env_class, part) is not method]
    parts += ["roles"] if len(env_class.roles) > 1 and base is BaseMDPEnv else []
    parts += ["opponents"] if opponents or env_class.opponents else []
    if parts:
        raise ConfigError(
            f"The environment {name!r} cannot be hosted: {env_class.__name__}.{parts[0]} does the trainer's work. Run it in "
            "the trainer's process."
        )


def _roles(env: BaseMDPEnv) -> dict[str, Any]:
    """Return the properties of an environment in which several roles speak."""
    if not isinstance(env, RolesEnv):
        return {}
    texts = {role: env.instructions.get(role, env.instruction) for role in env.roles}
    instructions = {role: text for role, text in texts.items() if text is not None}
    return {"roles": env.roles, "frozen": env.frozen, "instructions": instructions}


async def _turn(env: BaseMDPEnv, sample: SampleState) -> Any:
    """Return the answer to a turn: the environment's replies, or whose turn it is and what that role reads."""
    if not isinstance(env, RolesEnv):
        return wire.answer(sample, await env._respond_safely(sample))
    role, text = await env._turn_safely(sample) or ("", "")
    return wire.answer(sample, [ChatMessage("user", text)] if text else [], role=role)


def _tokenizer(files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory(prefix="rl4llm-env-") as directory:
        for name, data in files.items():
            Path(directory, Path(name).name).write_bytes(data)  # in no other directory
        return load_tokenizer(directory)


async def _next(messages: AsyncIterator[Any], timeout_s: float) -> Any:
    """Return the next message. Raises DataError on a timeout and at the end of the stream."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise DataError(f"the trainer ended the call, or sent nothing for {timeout_s:g} s.") from None


class Scoring:
    """Calls the rewards in one thread at a time, as in a trainer; episodes that end meanwhile are the next batch."""

    def __init__(self, reward_functions: Sequence[BaseRewardFunction]):
        self._rewards = reward_functions
        self._batch: list[SampleState] = []
        self._task: asyncio.Task[list[Scores]] | None = None
        self._turn = asyncio.Lock()

    async def score(self, sample: SampleState) -> Scores:
        """Return the score of each reward by name, up to the first that fails. Raises RewardError like `ask`."""
        if self._task is None or not self._batch:
            self._task = asyncio.create_task(self._score_batch())
        number, task = len(self._batch), self._task
        self._batch.append(sample)
        return (await asyncio.shield(task))[number]  # an episode that is cancelled does not cancel the others

    async def _score_batch(self) -> list[Scores]:
        async with self._turn:
            batch, self._batch = self._batch, []
            return await in_own_thread("rl4llm-env-score", partial(self._ask, batch))

    def _ask(self, samples: Sequence[SampleState]) -> list[Scores]:
        scores: list[Scores] = [{} for _ in samples]
        for reward in self._rewards:
            whole = [number for number, row in enumerate(scores) if Broken not in map(type, row.values())]
            patience = Patience(SLOW_AFTER_S, reward.score_timeout_s)
            values = ask(reward, [samples[number] for number in whole], patience)
            for number, value in zip(whole, values, strict=True):
                scores[number][reward.name] = value
        return scores
