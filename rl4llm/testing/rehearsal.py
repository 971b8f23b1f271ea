"""What `check_env` plays with: an engine that keeps a record, and an environment that breaks on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import EnvError, RL4LLMError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, Trajectory
from rl4llm.envs.roles import RolesEnv
from rl4llm.envs.rollout import RolloutResult
from rl4llm.testing.scripted import ScriptedClient

IDLE = 1000  # so often a loop may ask for a turn that the context has no room for


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rollout: what the engine was asked and said, and what became of it."""

    client: Recorder
    result: RolloutResult
    error: RL4LLMError | None

    @property
    def episodes(self) -> dict[tuple[str, int], Trajectory]:
        return {(group_of(item), item.extras["sample"]): item for item in self.result.trajectories}

    @property
    def broken(self) -> str | None:
        """What went wrong first, with what the policy had said last."""
        if self.error is not None:
            return str(self.error)
        if not self.result.failed:
            return None
        sample = self.result.failed[0]
        reply = next((item.content for item in reversed(sample.messages) if item.role == "assistant"), None)
        return f"prompt {sample.prompt_id!r}, sample {sample.index}, policy {reply!r:.200}: {sample.failure}"


class Recorder(ScriptedClient):
    """Says each of some replies as the first of an episode, and others after it; remembers what it said to what.

    It never answers the session `silent`, and stops a loop that asks for more turns than an episode may have.
    """

    def __init__(self, tokenizer: Any, replies: Sequence[str], room: int, max_turns: int, silent: str):
        super().__init__(tokenizer, self._next, context_length=room)
        self.replies, self.max_turns, self.silent = replies, max_turns, silent
        self.firsts: dict[str, tuple[int, ...]] = {}
        self.said: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}
        # By session: the prompts of its turns, from its last beginning.
        self._asked: dict[str, list[tuple[int, ...]]] = {}
        self._idle = 0
        self.over: str | None = None  # how a loop asked for too much

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        if not session:
            return await super().generate(prompt_ids, sampling_params, images=images)
        prompt = tuple(prompt_ids)
        self.firsts.setdefault(session, prompt)
        prompts = self._asked.setdefault(session, [])
        if prompts and prompt[: len(prompts[-1])] != prompts[-1]:  # the episode is played again
            prompts.clear()
        if prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) > self.max_turns:
            self._stop(f"session {session} asks for turn {len(prompts)}, and max_steps is {self.max_turns}")
        if session == self.silent:
            raise UnreachableError("check_env keeps the engine silent for this episode.")
        completion = await super().generate(prompt_ids, sampling_params, session=session, images=images)
        sample = (completion.token_ids, completion.logprobs)
        self.said.setdefault((prompt_of(session), prompt), []).append(sample)
        return completion

    async def version(self) -> int:
        self._idle += 1
        if self._idle > IDLE * len(self.replies):
            self._stop("turns without end are asked for samples that are done, because the context is full")
        return await super().version()

    def _stop(self, over: str) -> NoReturn:
        self.over = over
        raise EnvError(f"check_env: {over}.")

    def _next(self, session: str, prompt_ids: Sequence[int]) -> str:
        index, turn = (index_of(session), len(self._asked[session]) - 1) if session else (0, 0)
        return self.replies[(index + turn) % len(self.replies)]


def breaking(env: BaseMDPEnv, victim: tuple[str, int], raised: list[str]) -> BaseMDPEnv:
    """Return an environment that shares everything with `env`, but whose step raises for one episode."""
    if isinstance(env, RolesEnv):
        return _sharing(env, "_turn", _breaking_turn(type(env)._turn, victim, raised))
    respond = type(env).respond

    def stumble(sample: SampleState) -> None:
        if (sample.prompt_id, sample.index) == victim:
            raised.append(sample.session)
            raise RuntimeError("check_env makes this step raise")

    async def awaited(self: BaseMDPEnv, sample: SampleState) -> Sequence[ChatMessage]:
        stumble(sample)
        replies = respond(self, sample)
        return await replies if isinstance(replies, Coroutine) else replies

    def plain(self: BaseMDPEnv, sample: SampleState) -> Any:
        stumble(sample)
        return respond(self, sample)

    method = awaited if inspect.iscoroutinefunction(respond) else plain
    return _sharing(env, "respond", method)


def _breaking_turn(
    turn: Callable[..., Any], victim: tuple[str, int], raised: list[str]
) -> Callable[..., Any]:
    async def stumble(self: RolesEnv, sample: SampleState) -> Any:
        if sample.episode and sample.episode.said and (sample.prompt_id, sample.index) == victim:
            raised.append(sample.session)
            raise RuntimeError("check_env makes this step raise")
        return await turn(self, sample)

    return stumble


def _sharing(env: BaseMDPEnv, name: str, method: Callable[..., Any]) -> BaseMDPEnv:
    kind = type(type(env).__name__, (type(env),), {name: method})
    stumbling: BaseMDPEnv = object.__new__(kind)
    vars(stumbling).update(vars(env))
    return stumbling


def prompt_of(session: str) -> str:
    return session.partition("/")[2].rpartition("/")[0]


def index_of(session: str) -> int:
    return int(session.rpartition("/")[2])


def group_of(item: Trajectory | SampleState) -> str:
    return name_of_group(item.prompt_id, item.role)


def name_of_group(prompt_id: str, role: str) -> str:
    """Return the name that sessions use for a group."""
    return f"{prompt_id}/{role}" if role else prompt_id
