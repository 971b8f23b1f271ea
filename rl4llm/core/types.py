"""The nouns of rl4llm: what flows from a prompt to an optimizer step.

Shape letters end tensor names: B rows, T tokens, G trajectories of a group, V vocabulary, D hidden.
Every ``x_BT[b, t]`` describes the token ``token_ids_BT[b, t]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.core.errors import DataError, EngineError
from rl4llm.core.images import Image, ImagePlace, moved
from rl4llm.core.message import ROLES as ROLES
from rl4llm.core.message import ChatMessage as ChatMessage

Author = Literal["policy", "context"]
FinishReason = Literal["stop", "length", "abort"]
Relation = Literal["continues", "rewrites", "called"]
GroupKey = tuple[str, str, int]
"""A prompt, one of its roles in an episode of several, and which of the step's groups this is."""

TRUNCATED = ("length", "context")
"""The stop reasons of a trajectory that ran out of tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples one completion. temperature 0 is greedy; top_p 1 and top_k 0 switch those filters off.

    `stop_token_ids` are kept in the completion, `stop` strings end it: their tokens are kept, the text is cut before them.
    Equal seeds give equal random streams, whatever else the engine is doing. A `grammar` is what the completion has to
    match, in the form of `rl4llm.data.grammars`.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    grammar: str = ""

    def __post_init__(self) -> None:
        finite = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6  # as logits divided by it are
        for name, holds, range_ in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", finite, "0 (greedy), or 1e-6 to 1e6"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1 (1 is off)"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) to 2147483647"),
        ):
            if not holds:
                raise EngineError(f"SamplingParams.{name}={getattr(self, name)!r} is not accepted: {range_}.")

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled, exactly as it sampled it.

    `token_ids` holds every sampled token, the stop token included. `logprobs[i]` is the natural log-probability of
    `token_ids[i]` under the temperature-scaled softmax, before top-p and top-k (at temperature 0: of the plain softmax).
    `text` is the decoded tokens without special tokens, cut before a stop string. `version` is that of the weights that
    sampled the first token; when they were replaced on the way, `versions` holds (start, version) of each run of tokens
    that the same weights sampled. `finish_reason` is "stop" (a stop token or string), "length" or "abort".
    With a `grammar` every token was sampled among those that the grammar allowed there, and log-probs are of these alone.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    versions: tuple[tuple[int, int], ...] = ()
    grammar: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise EngineError(f"{len(self.token_ids)} tokens sampled, but {len(self.logprobs)} log-probs.")

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Return (start, end, version) of each run of tokens that the same weights sampled."""
        starts = self.versions or ((0, self.version),)
        ends = (*(start for start, _ in starts[1:]), len(self.token_ids))
        return [(start, end, version) for (start, version), end in zip(starts, ends, strict=True)]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field by its name, as loops do that expect the answer of a server: ``outputs[i].get("text", "")``."""
        return getattr(self, name, default)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens with one author. Only the policy's own tokens carry log-probs, and only they train.

    `images` are the places of images among the tokens, in order; only context has any. `grammar` is that of the completion.
    """

    token_ids: tuple[int, ...]
    author: Author
    logprobs: tuple[float, ...] | None = None
    version: int | None = None
    images: tuple[ImagePlace, ...] = ()
    grammar: str = ""

    def __post_init__(self) -> None:
        if (self.author == "policy") != (self.logprobs is not None):
            raise EngineError(f"A {self.author} span has {'no ' if self.logprobs is None else ''}log-probs.")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise EngineError(f"A span has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs.")

    @classmethod
    def context(cls, token_ids: list[int] | tuple[int, ...], images: Sequence[ImagePlace] = ()) -> TokenSpan:
        """Return a span of tokens that the environment or the template wrote."""
        return cls(tuple(token_ids), "context", images=tuple(images))

    def cut(self, at: int) -> tuple[TokenSpan, TokenSpan]:
        """Return the tokens of a context span before and from `at` on, which is inside no image."""
        head = tuple(place for place in self.images if place.offset < at)
        tail = moved(self.images[len(head) :], -at)
        return TokenSpan.context(self.token_ids[:at], head), TokenSpan.context(self.token_ids[at:], tail)

    @classmethod
    def policy(cls, completion: Completion) -> tuple[TokenSpan, ...]:
        """Return the tokens that the policy sampled: one span for each version of the weights."""
        ids, logprobs, grammar = completion.token_ids, completion.logprobs, completion.grammar
        return tuple(
            cls(ids[start:end], "policy", logprobs[start:end], version, grammar=grammar)
            for start, end, version in completion.runs
        )


def images_of(spans: Sequence[TokenSpan]) -> tuple[ImagePlace, ...]:
    """Return the places of the images among all tokens of these spans together."""
    places: list[ImagePlace] = []
    before = 0
    for span in spans:
        if span.images:
            places += moved(span.images, before)
        before += len(span.token_ids)
    return tuple(places)


def count_turns(spans: Sequence[TokenSpan]) -> int:
    """Return how often the policy spoke; a turn that several versions of the weights wrote counts once."""
    return sum(author == "policy" for author, _ in groupby(span.author for span in spans))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a later token record of an episode begins: after the first `turn` turns of the record number `record`.

    It "continues" a record whose history was compacted: it has the policy's own text of that turn. It "rewrites" a record
    that begins alike, or it was "called": a sub-agent's conversation, begun during a call that was not answered yet.
    """

    relation: Relation
    record: int
    turn: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode: its exact tokens, its messages and its reward.

    `turn_rewards` has one number for each turn of the policy, or is empty; their sum is part of `reward`. In an episode
    of several roles each has its own trajectory, and `role` names it. `part` names the environment in a mixture.
    `successes` says, for each reward that defines success, whether the episode reached it; the first of them counts.

    An episode whose history was rewritten has one token record for each history: the first is `spans`, those that came
    later are `forks`. What two records share was sampled in one of them and is context in the other. `origins` tells
    where each fork begins, None where that is not known.
    """

    prompt_id: str
    spans: tuple[TokenSpan, ...]
    messages: tuple[ChatMessage, ...]
    rewards: Mapping[str, float]
    reward: float
    stop_reason: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    forks: tuple[tuple[TokenSpan, ...], ...] = ()
    role: str = ""
    part: str = ""
    origins: tuple[Origin | None, ...] = ()
    draw: int = 0  # its group's number in the step, in which a prompt may occur twice
    successes: Mapping[str, bool] = field(default_factory=dict)
    privileged: tuple[tuple[TokenSpan, ...] | None, ...] = ()  # the records for a reference that knows more

    @property
    def success(self) -> bool | None:
        """Return whether the episode was a success; None if no reward defines success."""
        return next(iter(self.successes.values()), None)

    @property
    def group_key(self) -> GroupKey:
        """Return a key that is equal for trajectories that are compared with one another."""
        return self.prompt_id, self.role, self.draw

    @property
    def records(self) -> tuple[tuple[TokenSpan, ...], ...]:
        """All token records of the episode; its turns are numbered through them, one record after the other."""
        return (self.spans, *self.forks)

    def by_record(self) -> tuple[Trajectory, ...]:
        """Return a trajectory for each token record; the rewards are still those of the episode."""
        if not self.forks:
            return (self,)
        return tuple(replace(self, spans=record, forks=(), turn_rewards=()) for record in self.records)

    @property
    def token_ids(self) -> list[int]:
        return [token for span in self.spans for token in span.token_ids]

    @property
    def policy_spans(self) -> list[TokenSpan]:
        return [span for record in self.records for span in record if span.author == "policy"]

    @property
    def num_tokens(self) -> int:
        return sum(len(span.token_ids) for record in self.records for span in record)

    @property
    def num_policy_tokens(self) -> int:
        return sum(len(span.token_ids) for span in self.policy_spans)

    @property
    def num_turns(self) -> int:
        return sum(map(count_turns, self.records))

    @property
    def version(self) -> int:
        """The oldest version of the weights that wrote any of it."""
        return min((span.version or 0 for span in self.policy_spans), default=0)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt and role, in sample order; all start with the same prompt tokens.

    `baseline` is one more that only serves for comparison and never trains, such as the greedy one. Nothing of a `frozen`
    group trains: the policy only plays that role.
    """

    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        where = f"Group {self.prompt_id!r}"
        for trajectory in self.trajectories:
            if trajectory.prompt_id != self.prompt_id:
                raise EngineError(f"{where} holds a trajectory of prompt {trajectory.prompt_id!r}.")
            if trajectory.role != self.role:
                raise EngineError(f"{where} holds the roles {self.role!r} and {trajectory.role!r}.")
            if trajectory.spans[0] != self.trajectories[0].spans[0]:
                raise EngineError(f"{where}: its trajectories start from different prompt tokens.")

    @property
    def role(self) -> str:
        """Who speaks as the policy in its trajectories."""
        return self.trajectories[0].role if self.trajectories else ""

    @property
    def rewards_G(self) -> Tensor:
        return torch.tensor([trajectory.reward for trajectory in self.trajectories], dtype=torch.float64)


class FilledLater:
    """A tensor that is set later; reading it before raises DataError, which names who sets it."""

    def __init__(self, filled_by: str):
        self._filled_by = filled_by

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: TrainBatch, owner: type) -> Tensor:
        if self._name not in batch.later:
            raise DataError(f"TrainBatch.{self._name} is not set yet: {self._filled_by}.")
        return batch.later[self._name]

    def __set__(self, batch: TrainBatch, value: Tensor) -> None:
        batch.later = {**batch.later, self._name: value}  # copies of a batch may share what was there before


@dataclass(slots=True)
class TrainBatch:
    """Rows of tokens and what is known of each token. B rows, T tokens.

    Several trajectories may share a row: equal `segment_ids_BT` in a row belong to one trajectory, 0 is padding, and
    positions start again at each. `mask_BT` marks what the policy sampled. `weights_BT` is how much each token counts in
    the step's loss; the sum over all batches of all ranks is fixed once per optimizer step, so neither packing nor
    micro-batches nor ranks change the gradient.

    With prefix sharing, tokens with which several trajectories of a row begin are computed once. Then `computed_BT` has the
    column of the token that is computed for each: its own, or that of the same token after the same tokens in a
    trajectory further left; -1 for padding. A trajectory begins with the token before the first one that it computes or
    trains, at its position.

    `group_ids_BT` numbers the groups of a step, `record_ids_BT` the token records of the update, in which
    `position_ids_BT` gives the place of a policy token. `divergence` () is an estimate for the whole step; the
    algorithm defines what it means.

    Where tokens stand for images, `feature_ids_BT` numbers the tokens of `images`, one image after the other, and is -1 at
    all others. `axes_BTA` has the positions of a model that counts along several axes.

    Where grammars constrained tokens, `allowed_ids_BT` is the row of `allowed_CW` whose bits are the tokens that could be
    sampled there. It is -1 at all others, which may be any token.
    """

    TOKEN_BYTES: ClassVar[int] = 80  # six columns of 8 bytes, six of 4, one of 1, and the algorithm's

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    segment_ids_BT: Tensor
    mask_BT: Tensor
    sampled_logprobs_BT: Tensor
    credits_BT: Tensor
    weights_BT: Tensor
    computed_BT: Tensor | None = None
    group_ids_BT: Tensor | None = None
    record_ids_BT: Tensor | None = None
    axes_BTA: Tensor | None = None
    feature_ids_BT: Tensor | None = None
    allowed_ids_BT: Tensor | None = None
    allowed_CW: Tensor | None = None
    images: tuple[Image, ...] = ()
    later: Mapping[str, Tensor] = field(default_factory=dict)
    host: TrainBatch | None = field(default=None, repr=False, compare=False)
    """The batch that `to` copied to a GPU, where reading numbers would wait for all that the GPU still has to do."""

    old_logprobs_BT = FilledLater("the trainer fills it before `assign`")
    old_entropy_BT = FilledLater("the trainer fills it for an algorithm whose `needs` say old_entropy=True")
    ref_logprobs_BT = FilledLater("the trainer fills it for an algorithm whose `needs` say reference=True")
    ref_divergence_BT = FilledLater("the backend fills it for an algorithm whose `needs` have a divergence")
    values_BT = FilledLater("the trainer fills it for an algorithm whose `needs` name a critic")
    advantages_BT = FilledLater("the algorithm's `assign` fills it")
    returns_BT = FilledLater("the `assign` of an algorithm with a critic fills it")
    divergence = FilledLater("the trainer fills it for an algorithm whose `needs` say mismatched=True")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], images: tuple[Image, ...] = ()) -> TrainBatch:
        names = {item.name for item in fields(cls)}
        columns: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in names}
        return cls(
            **columns, later={name: tensors[name] for name in tensors if name not in names}, images=images
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name."""
        names = (item.name for item in fields(self) if item.name not in ("later", "host", "images"))
        columns = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in (columns | dict(self.later)).items() if tensor is not None}

    def map(self, fn: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Return a batch with `fn` applied to every tensor."""
        return TrainBatch.of({name: fn(tensor) for name, tensor in self.tensors().items()}, self.images)

    def to(self, device: torch.device | str) -> TrainBatch:
        """Return a batch with every tensor on `device`; copies to a GPU do not wait for it."""
        leaves = torch.device(device).type != "cpu"
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=leaves))
        if leaves:
            moved.host = self if self.token_ids_BT.device.type == "cpu" else self.host
        return moved


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of one model, the policy ("model") or the "critic", and the micro-batches that it learns from.

    `records` are the token records that the batches were made of, in the order in which `record_ids_BT` numbers them.
    """

    batches: Sequence[TrainBatch]
    records: Sequence[tuple[TokenSpan, ...]] = ()
    model: Literal["model", "critic"] = "model"
