"""Trajectories become batches: where each token stands, and how much it counts.

Three layouts hold the same tokens, and give the same loss and gradient:

- ``sorted``: one trajectory per row, rows of similar length together, padded on the right.
- ``packed``: rows filled with several trajectories, no padding.
- ``shared``: like packed, but the prompt that the trajectories of a group share stands there once.

No loop here runs over tokens: they are flattened once, and every layout only says where runs of them go.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry
from rl4llm.core.types import TrainBatch, Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEVER = -1


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What one optimizer step trains on, over all micro-batches and ranks: policy tokens, trajectories and prompts.

    A prompt counts once for each role that was played in it.
    `constant_length` is the divisor of the aggregation "constant", in tokens.
    """

    tokens: int
    sequences: int
    prompts: int = 1
    constant_length: int = 0

    def __add__(self, other: StepTotals) -> StepTotals:
        counts = (self.tokens + other.tokens, self.sequences + other.sequences, self.prompts + other.prompts)
        return StepTotals(*counts, self.constant_length)


def totals_of(trajectories: Sequence[Trajectory], *, constant_length: int = 0) -> StepTotals:
    """The totals of one optimizer step; add those of other ranks before packing."""
    tokens = sum(trajectory.num_policy_tokens for trajectory in trajectories)
    prompts = len({trajectory.group_key for trajectory in trajectories})
    return StepTotals(tokens, len(trajectories), prompts, constant_length)


# (policy tokens and prompt number of each trajectory, totals of the step) -> weight of one token of each trajectory
Aggregation = Callable[[Ints, Ints, StepTotals], Floats]
AGGREGATIONS: Registry[Aggregation] = Registry("algorithm.aggregation")


@AGGREGATIONS.register("token")
def _each_token_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over all tokens of the step. Yu et al. 2025 (DAPO), section 3.3."""
    return np.full(len(policy_tokens), 1 / max(totals.tokens, 1))


@AGGREGATIONS.register("sequence")
def _each_trajectory_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over trajectories of their means over tokens. Shao et al. 2024 (DeepSeekMath), equation 3."""
    return 1 / (policy_tokens.clip(1) * totals.sequences)


@AGGREGATIONS.register("prompt")
def _each_prompt_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over prompts of the means over all tokens of their trajectories. Yu et al. 2025 (DAPO), equation 8."""
    return 1 / (np.bincount(prompts, weights=policy_tokens).clip(1)[prompts] * totals.prompts)


@AGGREGATIONS.register("constant")
def _constant_divisor(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over trajectories of their sums over a constant. Liu et al. 2025 (Dr. GRPO), section 3.2."""
    if totals.constant_length < 1:
        raise ConfigError(
            f"algorithm.aggregation='constant' divides by a fixed number of tokens, but training.constant_length is "
            f"{totals.constant_length}. Set it to the number of tokens of the longest completion, 1 or above."
        )
    return np.full(len(policy_tokens), 1 / (totals.constant_length * totals.sequences))


def check_aggregation(name: str, constant_length: int) -> None:
    """Raise ConfigError for an aggregation that is unknown, or has no length to divide by."""
    AGGREGATIONS[name](np.ones(1, np.int64), np.zeros(1, np.int64), StepTotals(1, 1, 1, constant_length))


Credit = float | Sequence[float] | None
"""Of a trajectory, or of each of its turns; with None it counts in every total, but has nothing to learn."""


def pack(
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    *,
    max_tokens_per_batch: int,
    layout: str,
    aggregation: str,
    totals: StepTotals,
    pad_token_id: int,
    whole_groups: bool = False,
) -> list[TrainBatch]:
    """Micro-batches of at most `max_tokens_per_batch` tokens, padding included.

    Each token record of a trajectory is a sequence of its own, and its tokens weigh what the whole trajectory's do; records
    are numbered through all trajectories, those without a place included.
    Trajectories without a token of the policy have nothing to learn and get no place; `totals` still counts them. With
    `whole_groups` the trajectories of a prompt stand in the same micro-batch.
    Raises ConfigError when what cannot be cut exceeds the budget.
    """
    if not trajectories:
        return []
    prompts = _numbered(trajectory.group_key for trajectory in trajectories)
    policy_tokens = np.array([trajectory.num_policy_tokens for trajectory in trajectories], np.int64)
    weights = AGGREGATIONS[aggregation](policy_tokens, prompts, totals)
    owners, trajectories, credits = _by_record(trajectories, credits)
    prompts, weights = prompts[owners], weights[owners]
    kept = [i for i, credit in enumerate(credits) if credit is not None and trajectories[i].num_policy_tokens > 0]
    lengths = np.array([trajectory.num_tokens for trajectory in trajectories], np.int64)
    batches = []
    for part in _parts(kept, prompts, lengths, max_tokens_per_batch) if whole_groups else filter(None, [kept]):
        flat = _flatten(
            [trajectories[i] for i in part],
            [credits[i] for i in part],
            weights=weights[part],
            prompts=prompts[part],
            records=np.array(part, np.int64),
        )
        budget = int(flat.lengths.max()) * len(part) if whole_groups else max_tokens_per_batch
        _check_budget(int(flat.lengths.max()), budget)
        batches += [_batch(flat, pieces, pad_token_id) for pieces in LAYOUTS[layout](flat, budget).by_batch()]
    return batches


def _by_record(
    trajectories: Sequence[Trajectory], credits: Sequence[Credit]
) -> tuple[list[int], list[Trajectory], list[Credit]]:
    """Token records as trajectories with credits of their own, and the number of the trajectory that each is of."""
    owners, records, shares = [], [], []
    for i, (trajectory, credit) in enumerate(zip(trajectories, credits, strict=True)):
        first = 0
        for record in trajectory.by_record():
            turns = slice(first, first + record.num_turns)
            owners.append(i)
            records.append(record)
            shares.append(credit[turns] if isinstance(credit, Sequence) and trajectory.forks else credit)
            first = turns.stop
    return owners, records, shares


def _parts(kept: list[int], prompts: Ints, lengths: Ints, budget: int) -> list[list[int]]:
    """Trajectories by micro-batch, where those of a prompt must stay together."""
    sizes = np.bincount(prompts[kept], weights=lengths[kept], minlength=1).astype(np.int64)
    _check_budget(int(sizes.max()), budget, what="all trajectories of a prompt together have")
    chosen = _first_fit(sizes, budget)[prompts[kept]]
    return [[kept[i] for i in np.flatnonzero(chosen == part)] for part in np.unique(chosen)]


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """How much a rollout of one rank is at most: of each trajectory the longest prompt, and all that may follow it."""

    prompts: int
    samples: int
    roles: int
    prompt_tokens: int
    new_tokens: int

    @property
    def trajectories(self) -> int:
        """Of a rollout."""
        return self.prompts * self.samples * self.roles

    @property
    def longest(self) -> int:
        """Tokens of a trajectory."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class BatchPlan(RolloutSize):
    """How a rollout becomes micro-batches when every trajectory is as long as it may be.

    Of each micro-batch of an optimizer step, `tokens` that are computed, padding included, and `sequences` in it.
    """

    updates: int
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]

    def table(self) -> list[dict[str, object]]:
        """As rows of a table."""
        rows = {
            "prompts per rollout": self.prompts,
            "samples per prompt": self.samples,
            **({"roles that learn": self.roles} if self.roles > 1 else {}),
            "trajectories per rollout": self.trajectories,
            "optimizer steps per rollout": self.updates,
            "longest trajectory (tokens)": self.longest,
            "micro-batches per optimizer step, at most": len(self.tokens),
            "tokens per micro-batch, at most": max(self.tokens),
            "tokens computed per optimizer step, at most": sum(self.tokens),
        }
        return [{"what": what, "value": value} for what, value in rows.items()]


def plan_batches(
    *,
    prompts: int,
    samples: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_tokens_per_batch: int,
    layout: str,
    updates: int = 1,
    roles: int = 1,
) -> BatchPlan:
    """How prompts x samples x roles become micro-batches when every trajectory is as long as it may be.

    Raises ConfigError when one trajectory would exceed `max_tokens_per_batch`, or a step would train on no prompt.
    """
    longest = max_prompt_tokens + max_new_tokens
    _check_budget(longest, max_tokens_per_batch)
    if updates > prompts:
        raise ConfigError(f"training.updates_per_rollout={updates} is not accepted: at most one per prompt ({prompts}).")
    groups = math.ceil(prompts * roles / updates)
    lengths = np.full(groups * samples, longest, np.int64)
    owners = np.repeat(np.arange(groups), samples)
    pieces = LAYOUTS[layout](_Layable(lengths, np.full_like(lengths, max_prompt_tokens), owners), max_tokens_per_batch)
    batches = pieces.by_batch()
    return BatchPlan(
        prompts,
        samples,
        roles,
        max_prompt_tokens,
        max_new_tokens,
        updates=updates,
        tokens=tuple(int(piece.length.sum()) for piece in batches),
        sequences=tuple(int(((piece.previous != NEVER) | (piece.length == longest)).sum()) for piece in batches),
    )


@dataclass(frozen=True, slots=True)
class _Layable:
    """What a layout needs to know of each trajectory: its tokens, those of its prompt, and which group it is of."""

    lengths: Ints
    prompt_lengths: Ints
    groups: Ints

    @property
    def starts(self) -> Ints:
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True)
class _Flat(_Layable):
    """All tokens of all trajectories, one after another."""

    group_ids: Ints
    record_ids: Ints
    token_ids: Ints
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    credits: NDArray[np.float32]
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of flat tokens and where they go, one entry per run.

    `source` and `length` name the run; it begins at (`batch`, `row`, `column`) as `segment` of its row, with `position`
    as the first position id and `previous` as the column of the token before it.
    """

    source: Ints
    length: Ints
    batch: Ints
    row: Ints
    column: Ints
    segment: Ints
    position: Ints
    previous: Ints

    def by_batch(self) -> list[_Pieces]:
        order = np.argsort(self.batch, kind="stable")
        cuts = np.flatnonzero(np.diff(self.batch[order])) + 1
        names = self.__slots__
        return [_Pieces(*(getattr(self, name)[chosen] for name in names)) for chosen in np.split(order, cuts)]


Layout = Callable[[_Layable, int], _Pieces]
LAYOUTS: Registry[Layout] = Registry("training.layout")


@LAYOUTS.register("sorted")
def _sorted_rows(flat: _Layable, budget: int) -> _Pieces:
    order = np.argsort(-flat.lengths, kind="stable")
    batch, row, zeros = np.zeros((3, len(order)), np.int64)
    first = number = 0
    while first < len(order):
        last = min(len(order), first + budget // int(flat.lengths[order[first]]))
        batch[first:last] = number
        row[first:last] = np.arange(last - first)
        first, number = last, number + 1
    return _Pieces(flat.starts[order], flat.lengths[order], batch, row, zeros, zeros + 1, zeros, zeros + NEVER)


@LAYOUTS.register("packed")
def _packed_rows(flat: _Layable, budget: int) -> _Pieces:
    batch = _first_fit(flat.lengths, budget)
    zeros = np.zeros(len(batch), np.int64)
    column, segment = _line_up(flat.lengths, batch)
    return _Pieces(flat.starts, flat.lengths, batch, zeros, column, segment, zeros, zeros + NEVER)


@LAYOUTS.register("shared")
def _shared_prompts(flat: _Layable, budget: int) -> _Pieces:
    """A unit is a prompt and as many of its trajectories as the budget holds; units are packed like trajectories."""
    own = flat.lengths - flat.prompt_lengths
    unit = _units(flat, own, budget)
    members = np.bincount(unit)
    shares = members[unit] > 1  # a trajectory that is alone needs no segment for its prompt
    first = np.unique(unit, return_index=True)[1]
    heads = first[members > 1]
    source = np.concatenate([flat.starts[heads], flat.starts + np.where(shares, flat.prompt_lengths, 0)])
    length = np.concatenate([flat.prompt_lengths[heads], np.where(shares, own, flat.lengths)])
    owner = np.concatenate([unit[heads], unit])
    is_prompt = np.arange(len(owner)) < len(heads)
    order = np.lexsort((~is_prompt, owner))  # stable: each unit's prompt, then its trajectories
    source, length, owner = (array[order] for array in (source, length, owner))
    is_prompt = is_prompt[order]
    batch = _first_fit(np.bincount(owner, weights=length).astype(np.int64), budget)[owner]
    column, segment = _line_up(length, batch)
    prompt_of_unit = np.full(len(members), NEVER)
    prompt_of_unit[owner[is_prompt]] = np.flatnonzero(is_prompt)
    prompt = np.where(is_prompt, NEVER, prompt_of_unit[owner])
    follows = prompt != NEVER
    position = np.where(follows, length[prompt], 0)
    previous = np.where(follows, column[prompt] + length[prompt] - 1, NEVER)
    return _Pieces(source, length, batch, np.zeros_like(batch), column, segment, position, previous)


def _units(flat: _Layable, own: Ints, budget: int) -> Ints:
    """The unit of each trajectory: groups, cut where their tokens exceed the budget."""
    unit = np.zeros(len(own), np.int64)
    number, group, used = -1, None, 0
    for i in np.lexsort((-own, flat.groups)):
        if flat.groups[i] != group or used + own[i] > budget:
            number, group, used = number + 1, flat.groups[i], flat.prompt_lengths[i]
        used += own[i]
        unit[i] = number
    return unit


def _first_fit(sizes: Ints, budget: int) -> Ints:
    """First-fit decreasing: the number of the first bin with room for each item, bins numbered as they open."""
    bins, room, opened = np.zeros(len(sizes), np.int64), np.full(len(sizes), budget), 1
    for i in np.argsort(-sizes, kind="stable"):
        chosen = int(np.argmax(room[:opened] >= sizes[i]))
        if room[chosen] < sizes[i]:
            chosen, opened = opened, opened + 1
        room[chosen] -= sizes[i]
        bins[i] = chosen
    return bins


def _line_up(length: Ints, batch: Ints) -> tuple[Ints, Ints]:
    """Column and segment number of each run when the runs of a batch stand in one row, in the order given."""
    order = np.argsort(batch, kind="stable")
    ends = np.cumsum(length[order])
    opens = np.r_[True, np.diff(batch[order]) != 0]
    group = np.cumsum(opens) - 1
    starts = np.flatnonzero(opens)
    column, segment = np.empty_like(length), np.empty_like(length)
    column[order] = ends - length[order] - (ends - length[order])[starts][group]
    segment[order] = np.arange(len(order)) - starts[group] + 1
    return column, segment


def _flatten(
    trajectories: list[Trajectory], credits: list[Credit], *, weights: Floats, prompts: Ints, records: Ints
) -> _Flat:
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    counts = np.array([len(trajectory.spans) for trajectory in trajectories])
    sizes = np.array([len(span.token_ids) for span in spans])
    sampled = np.array([span.author == "policy" for span in spans])
    mask = np.repeat(sampled, sizes)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = _chained([span.logprobs for span in spans if span.logprobs is not None], np.float32)
    first_span = np.cumsum(counts) - counts
    lengths = np.add.reduceat(sizes, first_span)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return _Flat(
        lengths=lengths,
        prompt_lengths=np.where(sampled[first_span], 0, sizes[first_span]),
        groups=_groups(trajectories),
        group_ids=prompts[owner],
        record_ids=records[owner],
        token_ids=_chained([span.token_ids for span in spans], np.int64),
        mask=mask,
        logprobs=logprobs,
        credits=np.repeat(_span_credits(trajectories, credits), sizes).astype(np.float32),
        weights=(weights[owner] * mask).astype(np.float32),
    )


def _span_credits(trajectories: list[Trajectory], credits: list[Credit]) -> Floats:
    """The credit of each span's tokens: its turn's, or the one of its trajectory; 0 where the policy did not write."""
    found = []
    for trajectory, credit in zip(trajectories, credits, strict=True):
        turn, before = -1, "context"
        for span in trajectory.spans:
            turn += span.author == "policy" != before
            before = span.author
            own = credit[turn] if isinstance(credit, Sequence) and span.author == "policy" else credit
            found.append(own if span.author == "policy" else 0.0)
    return np.array(found, float)


def _groups(trajectories: list[Trajectory]) -> Ints:
    """Equal numbers for trajectories that begin with the same prompt; one that begins with the policy is alone."""
    firsts = ((i, t.group_key, t.spans[0]) for i, t in enumerate(trajectories))
    return _numbered(
        (key, first.token_ids) if first.author == "context" and first.token_ids else i for i, key, first in firsts
    )


def _numbered(keys: Iterable[object]) -> Ints:
    """Equal numbers for equal keys, from 0 in the order of appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _chained(parts: list[tuple[float, ...]], dtype: type) -> NDArray[Any]:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype, count=sum(map(len, parts)))


def _batch(flat: _Flat, pieces: _Pieces, pad_token_id: int) -> TrainBatch:
    rows, columns = int(pieces.row.max()) + 1, int((pieces.column + pieces.length).max())
    begins = np.cumsum(pieces.length) - pieces.length
    within = np.arange(int(pieces.length.sum())) - np.repeat(begins, pieces.length)
    column = np.repeat(pieces.column, pieces.length) + within
    target = np.repeat(pieces.row * columns, pieces.length) + column
    source = np.repeat(pieces.source, pieces.length) + within

    def spread(values: NDArray[Any], fill: int = 0) -> Tensor:
        out = np.full(rows * columns, fill, values.dtype)
        out[target] = values
        return torch.from_numpy(out.reshape(rows, columns))

    previous = None
    if (pieces.previous != NEVER).any():
        column_before = column - 1
        column_before[begins] = pieces.previous
        previous = spread(column_before, NEVER)
    return TrainBatch(
        token_ids_BT=spread(flat.token_ids[source], pad_token_id),
        position_ids_BT=spread(np.repeat(pieces.position, pieces.length) + within),
        segment_ids_BT=spread(np.repeat(pieces.segment, pieces.length)),
        mask_BT=spread(flat.mask[source]),
        sampled_logprobs_BT=spread(flat.logprobs[source]),
        credits_BT=spread(flat.credits[source]),
        weights_BT=spread(flat.weights[source]),
        previous_BT=previous,
        group_ids_BT=spread(flat.group_ids[source], NEVER),
        record_ids_BT=spread(flat.record_ids[source], NEVER),
    )


def _check_budget(longest: int, budget: int, what: str = "a trajectory has") -> None:
    if longest > budget:
        raise ConfigError(
            f"training.max_tokens_per_batch={budget} is too small: {what} {longest} tokens and cannot be cut. "
            f"Set it to {longest} or more, or shorten rollout.max_tokens, the number of turns or the prompts."
        )
