"""The public contract of environments and rewards: what users subclass.

Three levels, each a small step from the one before:

1. No subclass: a dataset with the columns `messages` and `ground_truth`, and reward functions.
2. ``respond(sample)``: the environment's next messages after each turn of the policy; an empty list ends the episode.
3. ``_run_interaction_loop(...)``: full control; whatever messages it appends, the tokens stay those that were sampled.
"""

from __future__ import annotations

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rl4llm.core.deadline import LateError, within
from rl4llm.core.errors import ConfigError, DataError, EnvError, RewardError, unknown
from rl4llm.core.threads import all_together, call_off_loop, in_own_thread
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, TokenSpan

__all__ = [
    "LLM",
    "BaseMDPEnv",
    "BaseRewardFunction",
    "ChatMessage",
    "EnvState",
    "EpisodeState",
    "Line",
    "RewardExample",
    "SampleState",
    "Score",
]

T = TypeVar("T")
Score = float | Sequence[float]
"""What a reward gives: a number, or with ``per_turn`` one for each turn of the policy."""
RewardTransform = Callable[[dict[str, Tensor]], Tensor]


@dataclass(slots=True)
class SampleState:
    """One attempt at one prompt, while it is in progress.

    `stop_reason` says why a finished attempt ended: "done" (the environment ended it), "max_steps", "length" (a turn ran
    into its token limit), "context" (no room for another turn) or "failed" (then `failure` says what broke, and
    `failure_class` of what kind that is, such as "env/timeout" or "math/unavailable"; a failed attempt is counted and left
    out of training, never scored 0). `spans` is the token record; only the `llm` writes it, or an environment that asks it
    for tokens. Where a history can be rewritten, `forks` holds further records, see `Trajectory`; `own_prompt` says that the
    dataset does not decide how it begins, so that other attempts may begin otherwise.
    What the environment puts into ``extras["metrics"]``, numbers by name, is logged as the mean ``env/<name>``.
    `sampling` holds fields of SamplingParams that are this sample's own. One that `is_baseline` is compared with, and never
    trains. Where several roles speak in an `episode`, each has a sample, in which its own lines are the assistant's. Where
    several environments are played, `part` names this one's.
    """

    prompt_id: str
    index: int
    messages: list[ChatMessage]
    ground_truth: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    init_msg_size: int = 0
    current_step: int = 0
    done: bool = False
    stop_reason: str | None = None
    failure: str | None = None
    failure_class: str = ""
    spans: list[TokenSpan] = field(default_factory=list)
    forks: list[list[TokenSpan]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    is_baseline: bool = False
    turn_rewards: dict[int, float] = field(default_factory=dict)
    own_prompt: bool = False
    role: str = ""
    part: str = ""
    episode: EpisodeState | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.init_msg_size = self.init_msg_size or len(self.messages)

    @property
    def token_ids(self) -> list[int]:
        token_ids: list[int] = []
        for span in self.spans:
            token_ids += span.token_ids
        return token_ids

    @property
    def policy_spans(self) -> list[TokenSpan]:
        return [span for record in (self.spans, *self.forks) for span in record if span.author == "policy"]

    @property
    def last_message(self) -> ChatMessage:
        return self.messages[-1]

    def reward_turn(self, reward: float) -> None:
        """What the policy's last turn earned by itself; it adds to the episode's reward, and to what the turn earned before.

        Raises EnvError for what is not a finite number, and before the policy has said anything.
        """
        turn = sum(message.role == "assistant" for message in self.messages[self.init_msg_size :]) - 1
        if turn < 0:
            raise EnvError(f"Prompt {self.prompt_id!r}: reward_turn({reward!r}) before the policy's first turn.")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvError(f"Prompt {self.prompt_id!r}: reward_turn({reward!r}) is not accepted: a finite number.")
        self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + float(reward)

    def finish(self, stop_reason: str) -> None:
        """End the attempt; the first reason given stays."""
        self.done = True
        self.stop_reason = self.stop_reason or stop_reason

    def fail(self, failure: str, failure_class: str = "env/failed") -> None:
        """End the attempt as failed, through no fault of the model: it will not train and not count as reward 0.

        What fails for one role fails for all of the episode.
        """
        for seat in (self,) if self.episode is None else self.episode.seats.values():
            seat.failure = failure if seat is self else f"role {self.role!r}: {failure}"
            seat.failure_class = failure_class
            seat.stop_reason = None
            seat.finish("failed")


class Line(NamedTuple):
    """What a role said in one turn."""

    role: str
    text: str


@dataclass(slots=True)
class EpisodeState:
    """What the roles of one episode have in common: the task as the dataset has it, what was said so far, in order, and
    each role's own sample. What is random in the episode derives from its `seed`."""

    task: Sequence[ChatMessage]
    seed: int = 0
    said: list[Line] = field(default_factory=list)
    seats: dict[str, SampleState] = field(default_factory=dict)


@dataclass(slots=True)
class EnvState:
    """All attempts of one rollout; the samples of one prompt stand together, and of these those of one episode."""

    sample_states: list[SampleState]
    step: int = 0

    @property
    def episodes(self) -> list[SampleState]:
        """The first sample of each episode."""
        seen: set[int] = set()
        firsts = []
        for sample in self.sample_states:
            episode = id(sample if sample.episode is None else sample.episode)
            if episode not in seen:
                firsts.append(sample)
            seen.add(episode)
        return firsts


class LLM(Protocol):
    """The policy as an environment sees it: messages in, messages out, the exact tokens recorded on the side."""

    @property
    def context_length(self) -> int:
        """Prompt plus completion, in tokens."""
        ...

    async def open(self, sample: SampleState) -> None:
        """The sample's episode begins; it will ask for replies until `close`."""
        ...

    async def close(self, sample: SampleState) -> None:
        """The sample's episode is over."""
        ...

    async def park(self, sample: SampleState) -> None:
        """Another role of the episode goes on, whose sample was opened; this one speaks again after another `open`."""
        ...

    async def reply(self, sample: SampleState, sampling_params: SamplingParams) -> Completion:
        """Sample the next assistant message, append it to `sample.messages` and its tokens to `sample.spans`."""
        ...

    async def complete(
        self, sample: SampleState, token_ids: Sequence[int], sampling_params: SamplingParams, *draw: int | str
    ) -> Completion:
        """What the policy says behind any tokens, where the environment writes `sample.spans` itself; see `PolicyLLM`."""
        ...

    def generate(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[Completion]:
        """The synchronous batch form for level-3 loops; a prompt is a SampleState, a list of messages or of token ids."""
        ...

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's event loop and wait for its result."""
        ...


@dataclass(frozen=True, slots=True)
class RewardExample:
    """A conversation and the score that a reward promises to give it, within `tolerance`.

    For a reward of turns the score is a list. `token_ids` stand for what the policy sampled, where a reward looks at that.
    """

    messages: Sequence[ChatMessage]
    ground_truth: Any
    score: Score
    columns: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    tolerance: float = 1e-6


class BaseRewardFunction(ABC):
    """A reward: called once per episode with the whole conversation.

        class ExactMatch(BaseRewardFunction):
            def __init__(self, name="exact_match", **kwargs):
                super().__init__(name)

            def __call__(self, messages, ground_truth, **kwargs) -> float:
                return float(messages[-1].content.strip() == ground_truth)

    `kwargs` holds the prompt's other columns. An exception, NaN or anything that is not a number marks the episode as
    failed; a wrong answer of the model is an ordinary low score. ``__call__`` may be async: then all episodes of a batch are
    scored at once.

    With ``per_turn = True`` the score is a list, a number for each assistant message after the prompt. What turns earn adds
    to the episode's reward beside the terminal ones, and algorithms with turn-level credit give each turn its own.

    A batch that takes longer than `score_timeout_s` marks its episodes as failed too. The reward runs in a thread of its
    own for that; one that works only in the main thread, as those that set signals do, needs ``score_timeout_s = None``.
    """

    score_timeout_s: float | None = 300.0
    per_turn: bool = False
    needs_roles: bool = False  # whether it only works where several roles speak in an episode
    rewards_among_options: tuple[str, ...] = ()  # options of the constructor that are rewards themselves
    parts: Sequence[BaseRewardFunction] = ()  # rewards that this one asks; their examples must hold too

    def __init__(self, name: str):
        if not re.fullmatch(r"[a-zA-Z0-9_\-]+", name):
            raise RewardError(f"Reward name {name!r} is not accepted: letters, digits, '_' and '-' only.")
        self.name = name

    @abstractmethod
    def __call__(
        self, messages: list[ChatMessage], ground_truth: Any, **kwargs: Any
    ) -> Score | Coroutine[Any, Any, Score]:
        """The score of one finished conversation."""

    def score_batch(self, samples: Sequence[SampleState]) -> Sequence[Score | Exception]:
        """Scores of many conversations, in order; an exception in place of a score fails that conversation alone.

        Override it where a batch is cheaper than one call each.
        """
        scores = [self(sample.messages, sample.ground_truth, **sample.columns) for sample in samples]
        awaited = [score for score in scores if isinstance(score, Coroutine)]
        return all_together(awaited) if awaited else [score for score in scores if not isinstance(score, Coroutine)]

    def examples(self) -> Sequence[RewardExample]:
        """Right and wrong answers with the score they must get; training refuses to start when one does not hold."""
        return ()

    def close(self) -> None:
        """Release worker processes and the like."""
        for part in self.parts:
            part.close()


def messages_of(items: Sequence[ChatMessage | Mapping[str, Any]]) -> list[ChatMessage]:
    """The messages of a row, which may be stored as mappings; raises DataError for what is none."""
    return [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in items]


class BaseMDPEnv:
    """A multi-turn environment over a dataset of prompts; without a subclass, one turn per prompt.

    Args:
        dataset: rows with `messages` (dicts with role and content) and `ground_truth`; other columns reach the rewards.
        tokenizer: the policy's tokenizer, with a chat template.
        reward_functions: terminal rewards; more than one needs `reward_transform_fn`.
        batch_size: prompts per rollout on this rank.
        group_size: attempts per prompt.
        max_steps: turns of the policy per episode.
        tool_schemas: JSON schemas of tools for the chat template.
        reward_transform_fn: combines rewards by name, tensors of shape (num_samples,), into one tensor of that shape.

    Raises ConfigError or DataError for anything that could not work.
    """

    respond_timeout_s: float = 120.0
    reply_roles: tuple[str, ...] = ("user",)  # of the messages that `respond` returns; the chat template must know them
    continue_truncated: bool = False  # whether an episode goes on after a turn that ran into its token limit
    roles: tuple[str, ...] = ("",)  # who speaks in an episode; each role's sample is one of the policy's, but for those of
    opponents: Mapping[str, Any] = {}  # roles that somebody else plays, by role
    frozen: Sequence[str] = ()  # roles that the policy plays without learning from it
    default_rewards: Sequence[Any] = ("math",)  # names, or mappings with options, where a configuration has no `rewards`
    prompts: Callable[..., Sequence[Mapping[str, Any]]] | None = None
    """A static method ``prompts(split, limit, **options)`` of an environment that brings its own dataset.

    Its options are options of the environment. What it returns for the splits "train" and "test" must not overlap.
    """

    def __init__(  # noqa: PLR0913 - the public contract
        self,
        dataset: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        reward_functions: Sequence[BaseRewardFunction],
        batch_size: int,
        group_size: int,
        max_steps: int = 1,
        tool_schemas: Sequence[Mapping[str, Any]] | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle_dataset: bool = True,
        reward_transform_fn: RewardTransform | None = None,
    ):
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.reward_functions = list(reward_functions)
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_steps = max_steps
        self.tool_schemas = list(tool_schemas) if tool_schemas else None
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle_dataset = shuffle_dataset
        self.reward_transform_fn = reward_transform_fn
        self._check()

    @property
    def policy_roles(self) -> tuple[str, ...]:
        """The roles that the policy plays."""
        return tuple(role for role in self.roles if role not in self.opponents)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that the policy learns from."""
        return tuple(role for role in self.policy_roles if role not in self.frozen)

    def opening(self, role: str, task: Sequence[ChatMessage], columns: Mapping[str, Any]) -> Sequence[ChatMessage]:
        """How the conversation of a role begins, from the messages and the other columns of a row: by default as it is."""
        return task

    def openings(self, row: Mapping[str, Any]) -> dict[str, list[ChatMessage]]:
        """How the conversation of each role begins; raises EnvError where `opening` does not return messages."""
        columns = dict(row)
        task = messages_of(columns.pop("messages"))
        found = {role: self.opening(role, task, columns) for role in self.roles}
        for role, messages in found.items():
            if not isinstance(messages, list | tuple) or not all(isinstance(item, ChatMessage) for item in messages):
                where = f"{type(self).__name__}.opening({role!r})"
                raise EnvError(f"{where} must return a list of ChatMessage, not {messages!r:.200}")
        return {role: list(messages) for role, messages in found.items()}

    def respond(self, sample: SampleState) -> Sequence[ChatMessage] | Coroutine[Any, Any, Sequence[ChatMessage]]:
        """The environment's next messages after the policy's last one; an empty list ends the episode. May be async."""
        return []

    @torch.inference_mode()
    def _run_interaction_loop(
        self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams, **kwargs: Any
    ) -> EnvState:
        """Play all episodes to their end. By default each sample is its own coroutine: a slow one holds up nobody."""
        llm.run(self._run_episodes(env_state, llm, self.turn_params(sampling_params)))
        return env_state

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        """How the policy's turns are sampled here, such as with a stop of the environment's own."""
        return sampling_params

    def end_episode(self, sample: SampleState) -> None:
        """Release what the sample's episode held; a loop of one's own calls this when the sample is done."""

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Where to send lines that the user should see."""

    def close(self) -> None:
        """Release the rewards."""
        for reward_function in self.reward_functions:
            reward_function.close()

    async def _open_episodes(self, env_state: EnvState, llm: LLM) -> None:
        """Announce all episodes before the first begins."""
        for sample in env_state.episodes:
            await llm.open(sample)

    async def _run_episodes(self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams) -> None:
        if len(self.roles) > 1 and type(self)._run_turns is BaseMDPEnv._run_turns:
            raise EnvError(f"{type(self).__name__} has several roles, but nothing says who speaks when. Subclass RolesEnv.")
        await self._open_episodes(env_state, llm)
        try:
            async with asyncio.TaskGroup() as episodes:
                for sample in env_state.episodes:
                    episodes.create_task(self._run_episode(sample, llm, sampling_params))
        except BaseExceptionGroup as failures:  # the group cancelled the other episodes; the first cause says it all
            raise failures.exceptions[0] from None

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        try:
            await self._run_turns(sample, llm, sampling_params)
        finally:
            self.end_episode(sample)
            await llm.close(sample)

    async def _run_turns(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        while not sample.done:
            completion = await llm.reply(sample, sampling_params)
            sample.current_step += 1
            if sample.done:
                return  # type: ignore[unreachable] # for mypy nobody else knows the sample
            if completion.finish_reason == "length" and not self.continue_truncated:
                sample.finish("length")
                return
            replies = await self._respond_safely(sample)
            if sample.current_step >= self.max_steps:
                sample.finish("max_steps" if replies else "done")
            elif not replies:
                sample.finish("done")
            else:
                sample.messages.extend(replies)

    async def _respond_safely(self, sample: SampleState) -> Sequence[ChatMessage]:
        async def respond() -> Sequence[ChatMessage]:
            return self._checked(await call_off_loop("rl4llm-env", self.respond, sample))

        where = f"{type(self).__name__}.respond"
        return await self.contained(sample, where, respond(), kind="env", timeout_s=self.respond_timeout_s) or []

    async def contained(
        self, sample: SampleState, what: str, work: Coroutine[Any, Any, T], *, kind: str, timeout_s: float | None
    ) -> T | None:
        """What the environment's side of a turn comes to; whatever breaks in it fails this episode alone, and is counted by
        `kind`. None then."""
        try:
            return await within(timeout_s, work)
        except LateError:
            sample.fail(f"{what} took more than {timeout_s:g} s", f"{kind}/timeout")
        except Exception as error:  # noqa: BLE001 - one of the two places: an environment's own code
            sample.fail(f"{what} raised {type(error).__name__}: {error}", f"{kind}/raised")
        return None

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread of its own: it starts at once, and one that hangs does not keep the process."""
        return await in_own_thread("rl4llm-env", work)

    def _checked(self, replies: Any) -> Sequence[ChatMessage]:
        where = f"{type(self).__name__}.respond"
        if not isinstance(replies, list | tuple) or not all(isinstance(reply, ChatMessage) for reply in replies):
            raise EnvError(f"{where} must return a list of ChatMessage ([] ends the episode), not {replies!r:.200}")
        if any(reply.role == "assistant" for reply in replies):
            raise EnvError(f"{where} returned an assistant message; only the policy writes those")
        return replies

    def _check(self) -> None:
        where = type(self).__name__
        for name in ("batch_size", "group_size", "max_steps", "world_size"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise ConfigError(f"{where}: {name}={number!r} is not accepted: a whole number, at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"{where}: rank={self.rank} is not accepted: 0 to {self.world_size - 1}.")
        if len(self.dataset) == 0:
            raise DataError(f"{where}: the dataset is empty.")
        row = self.dataset[0]
        taken = [column for column in ("role", "transcript") if column in row] if any(self.roles) else []
        if taken:
            raise DataError(f"{where}: rewards are told the role and the transcript, so columns {taken} need other names.")
        missing = [column for column in ("messages", "ground_truth") if column not in row]
        if missing:
            raise DataError(f"{where}: the dataset has no column {missing}; it has {sorted(row)}.")
        self._check_roles(where)
        self._check_rewards(where)

    def _check_roles(self, where: str) -> None:
        odd = [role for role in self.roles if not re.fullmatch(r"[a-zA-Z0-9_\-]+", str(role))] if self.roles != ("",) else []
        if odd:
            raise ConfigError(f"{where}: role {odd[0]!r} is not accepted: letters, digits, '_' and '-' only.")
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ConfigError(f"{where}: roles={list(self.roles)} is not accepted: at least one, and all different.")
        for key, role in (*(("frozen", role) for role in self.frozen), *(("opponents", role) for role in self.opponents)):
            if role not in self.roles:
                raise ConfigError(unknown(f"env.{key}", str(role), self.roles))
        if not self.trained_roles:
            played = f"env.frozen={list(self.frozen)}, env.opponents for {list(self.opponents)}"
            raise ConfigError(f"{where}: no role would learn ({played}). Leave one of {', '.join(self.roles)} out of them.")

    def _check_rewards(self, where: str) -> None:
        names = [reward_function.name for reward_function in self.reward_functions]
        if not names:
            raise ConfigError(f"{where}: reward_functions is empty; give at least one.")
        if len(set(names)) < len(names):
            raise ConfigError(f"{where}: reward names must differ, but are {names}.")
        judges = [reward_function.name for reward_function in self.reward_functions if _needs_roles(reward_function)]
        if judges and not any(self.roles):
            raise ConfigError(f"{where}: reward {judges[0]!r} judges several roles, and here is one. Choose another reward.")
        terminal = [reward_function.name for reward_function in self.reward_functions if not reward_function.per_turn]
        if len(terminal) > 1 and self.reward_transform_fn is None:
            raise ConfigError(f"{where}: {len(terminal)} rewards ({', '.join(terminal)}) need a reward_transform_fn.")


def _needs_roles(reward_function: BaseRewardFunction) -> bool:
    return reward_function.needs_roles or any(map(_needs_roles, reward_function.parts))
