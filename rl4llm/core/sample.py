"""Samples: the attempts at a prompt, while they are in progress and as they become trajectories and groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from rl4llm.core.errors import EnvError
from rl4llm.core.types import ChatMessage, Group, Origin, TokenSpan, Trajectory, count_turns


@dataclass(frozen=True, slots=True)
class Special:
    """What only some samples have.

    Where several roles speak in an `episode`, each has a sample, in which its own lines are the assistant's. In a mixture of
    environments, `part` names this one's; in a dataset with pools, the row's pool. `sampling` replaces fields of
    SamplingParams; a sample that `is_baseline` is compared with the others and never trains. Where a history can be
    rewritten, `forks` holds further token records and `origins` where each begins, see `Trajectory`; until the episode
    ends, `forks` are the records before the current one. `own_prompt` says that the dataset does not decide how the
    sample begins, so that others may begin differently.
    """

    role: str = ""
    episode: EpisodeState | None = field(default=None, repr=False, compare=False)
    part: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    is_baseline: bool = False
    forks: Sequence[Sequence[TokenSpan]] = ()
    origins: Sequence[Origin | None] = ()
    own_prompt: bool = False


@dataclass(slots=True)
class SampleState:
    """One attempt at one prompt, while it is in progress.

    `stop_reason` says why a finished sample ended: "done" (the environment ended it), "max_steps", "length" (a turn ran
    into its token limit), "context" (no room for another turn) or "failed" (then `failure` says what broke, and
    `failure_class` of what kind that is, such as "env/timeout" or "math/unavailable"; a failed sample is counted and left
    out of training, never scored 0). `spans` is the token record; only the `llm` writes it, or an environment that asks it
    for tokens.
    What the environment puts into ``extras["metrics"]``, numbers by name, is logged as the mean ``env/<name>``.
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
    extras: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    rewards: Mapping[str, float] | None = None  # what each reward function gave, when all have been asked
    special: Special = Special()

    def __post_init__(self) -> None:
        self.init_msg_size = self.init_msg_size or len(self.messages)

    @property
    def role(self) -> str:
        return self.special.role

    @property
    def episode(self) -> EpisodeState | None:
        return self.special.episode

    @property
    def seats(self) -> list[SampleState]:
        """Return the samples of all roles in the episode: this one alone unless several roles speak."""
        return list(self.episode.seats.values()) if self.episode else [self]

    @property
    def token_ids(self) -> list[int]:
        token_ids: list[int] = []
        for span in self.spans:
            token_ids += span.token_ids
        return token_ids

    @property
    def policy_spans(self) -> list[TokenSpan]:
        records = (self.spans, *self.special.forks)
        return [span for record in records for span in record if span.author == "policy"]

    @property
    def num_turns(self) -> int:
        """Return how often the policy spoke, in all token records."""
        return sum(map(count_turns, (self.spans, *self.special.forks)))

    @property
    def last_message(self) -> ChatMessage:
        return self.messages[-1]

    def reward_turn(self, reward: float) -> None:
        """Reward the policy's last turn by itself; this adds to the episode's reward, and to what the turn earned before.

        Raises EnvError for anything but a finite number, and before the policy's first turn.
        """
        turn = sum(message.role == "assistant" for message in self.messages[self.init_msg_size :]) - 1
        where = f"Prompt {self.prompt_id!r}: reward_turn({reward!r})"
        if turn < 0:
            raise EnvError(f"{where} before the policy's first turn.")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvError(f"{where} is not accepted: a finite number.")
        self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + float(reward)

    def finish(self, stop_reason: str) -> None:
        """End the sample; the first reason given stays."""
        self.done = True
        self.stop_reason = self.stop_reason or stop_reason

    def fail(self, failure: str, failure_class: str = "env/failed") -> None:
        """End the sample as failed, through no fault of the model: it will not train and not count as reward 0.

        What fails for one role fails for all of the episode.
        """
        for sample in self.seats:
            sample.failure = failure if sample is self else f"role {self.role!r}: {failure}"
            sample.failure_class = failure_class
            sample.stop_reason = None
            sample.finish("failed")


class Line(NamedTuple):
    """A line that a role wrote in one turn."""

    role: str
    text: str


@dataclass(slots=True)
class EpisodeState:
    """The shared state of the roles in one episode: the task from the dataset, all lines so far in order, and the
    sample of each role. What is random in the episode derives from its `seed`."""

    task: Sequence[ChatMessage]
    seed: int = 0
    said: list[Line] = field(default_factory=list)
    seats: dict[str, SampleState] = field(default_factory=dict)

    def seat(self, role: str, messages: list[ChatMessage], like: SampleState) -> SampleState:
        """Add the sample of a role, which begins with `messages`, and return it; the rest is that of `like`."""
        columns = {**like.columns, "role": role, "transcript": self.said}
        special = replace(like.special, role=role, episode=self)
        seat = SampleState(like.prompt_id, like.index, messages, like.ground_truth, columns, special=special)
        self.seats[role] = seat
        return seat


@dataclass(slots=True)
class EnvState:
    """All samples of one rollout; those of one prompt stand together, and among them those of one episode."""

    sample_states: list[SampleState]
    step: int = 0

    @property
    def episodes(self) -> list[SampleState]:
        """Return the first sample of each episode."""
        firsts: dict[int, SampleState] = {}
        for sample in self.sample_states:
            firsts.setdefault(id(sample.episode or sample), sample)
        return list(firsts.values())


def messages_of(items: Sequence[ChatMessage | Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the messages of a row, which may be mappings; raise DataError for an item that is not a message."""
    return [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in items]


def pool_of(row: Mapping[str, Any], column: str | None) -> str:
    """Return the name of a row's pool: the value of `column`, with "_" for what metrics cannot contain; "" without one."""
    value = row.get(column) if column else None
    return "" if value is None else re.sub(r"[^a-zA-Z0-9_\-]+", "_", str(value))


def trajectory_of(sample: SampleState, rewards: Mapping[str, float], reward: float) -> Trajectory:
    """Return the trajectory of a sample; what follows the policy's last turn does not train and is cut off."""
    turns = range(sample.num_turns) if sample.turn_rewards else ()
    turn_rewards = tuple(sample.turn_rewards.get(turn, 0.0) for turn in turns)
    spans, *forks = (
        tuple(record[: 1 + max(i for i, span in enumerate(record) if span.author == "policy")])
        for record in (sample.spans, *sample.special.forks)
    )
    return Trajectory(
        prompt_id=sample.prompt_id,
        spans=spans,
        messages=tuple(sample.messages),
        rewards=rewards,
        reward=reward + sum(turn_rewards),
        stop_reason=sample.stop_reason or "done",
        extras={"sample": sample.index, "ground_truth": sample.ground_truth, **sample.extras},
        turn_rewards=turn_rewards,
        forks=tuple(forks),
        origins=tuple(sample.special.origins),
        role=sample.role,
        part=sample.special.part,
    )


def group_of(
    samples: Sequence[SampleState], trajectories: Mapping[int, Trajectory], frozen: bool
) -> Group | None:
    """Return the group of the samples of one prompt and role; None if none of them was scored.

    `trajectories` has the scored ones by `id(sample)`.
    """
    scored = [(sample.special, trajectories[id(sample)]) for sample in samples if id(sample) in trajectories]
    members = [trajectory for special, trajectory in scored if not special.is_baseline]
    baseline = next((trajectory for special, trajectory in scored if special.is_baseline), None)
    if not members:
        return None
    if any(special.role or special.own_prompt for special, _ in scored):
        members = list(_from_common_start(members))
    return Group(members[0].prompt_id, tuple(members), baseline, frozen)


def _from_common_start(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Cut the first spans to the tokens that all trajectories share.

    They may differ: a later role begins with what others said, and an agent with what it writes.
    """
    firsts = [trajectory.spans[0] for trajectory in trajectories]
    if len(set(firsts)) == 1:
        yield from trajectories
        return
    tokens = enumerate(zip_longest(*(span.token_ids for span in firsts)))
    shared = next((i for i, ids in tokens if len(set(ids)) > 1), len(firsts[0].token_ids))
    images = [set(span.images) for span in firsts]
    common = set.intersection(*images)
    apart = (place for place in set.union(*images) if place not in common or place.end > shared)
    shared = min([shared, *(place.offset for place in apart)])
    for trajectory, span in zip(trajectories, firsts, strict=True):
        head, rest = span.cut(shared)
        spans = (head, *([rest] if rest.token_ids else []), *trajectory.spans[1:])
        yield replace(trajectory, spans=spans)
