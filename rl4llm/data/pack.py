"""Pack trajectories into batches: a loss aggregation weighs each token, and `layouts` places it (sequence packing).

No loop runs over tokens: they are flattened once, and a layout only places runs of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl4llm.core.errors import ConfigError
from rl4llm.core.images import ImagePlace
from rl4llm.core.registry import Registry, load
from rl4llm.core.types import TrainBatch, Trajectory
from rl4llm.data.layouts import LAYOUTS, NEVER, Lengths, Pieces, depth_first, first_fit, without_short

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Credit = float | Sequence[float] | None
"""The credit of a trajectory, or of each of its turns; None counts in every total, but does not train."""

ALLOWED = "rl4llm.data.grammars:AllowedTokens"
Positions = Callable[[int, Sequence[ImagePlace]], Ints]  # of a sequence and its images: (length, axes)


class StepTotals(NamedTuple):
    """The policy tokens, trajectories and prompts that one optimizer step trains on, over all micro-batches and ranks.

    A prompt counts once per group, that is once per draw and per role.
    """

    tokens: int
    sequences: int
    prompts: int = 1


def totals_of(trajectories: Sequence[Trajectory]) -> StepTotals:
    """Return the totals of one optimizer step on this rank; sum them with those of other ranks, field by field."""
    tokens = sum(trajectory.num_policy_tokens for trajectory in trajectories)
    return StepTotals(tokens, len(trajectories), len({trajectory.group_key for trajectory in trajectories}))


@dataclass(frozen=True, slots=True)
class Batching:
    """How trajectories become micro-batches and optimizer steps.

    Without `max_tokens_per_batch`, micro-batches have the usual size for the device. A longer trajectory, or with
    `whole_groups` a longer group, which cannot be cut, gets a micro-batch of its size.
    `constant_length` is the divisor of the aggregation "constant", in tokens. `positions` is for models that see images,
    `tokenizer` for turns that a grammar constrained.
    """

    layout: str = "shared"
    aggregation: str = "token"
    pad_token_id: int = 0
    max_tokens_per_batch: int | None = None
    usual_tokens_per_batch: int = 2048
    updates_per_rollout: int = 1
    passes_per_rollout: int = 1
    constant_length: int = 0
    whole_groups: bool = False
    positions: Positions | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        ones = np.ones(1, np.int64)
        # Refuses an unknown aggregation, and "constant" without a length to divide by.
        AGGREGATIONS[self.aggregation](ones, ones, StepTotals(1, 1), self.constant_length)

    def budget(self, lengths: Iterable[int]) -> int:
        """Return the tokens of a micro-batch for pieces of these lengths, which cannot be cut."""
        return max(self.max_tokens_per_batch or self.usual_tokens_per_batch, *lengths)

    def pack(
        self, trajectories: Sequence[Trajectory], credits: Sequence[Credit], totals: StepTotals | None = None
    ) -> list[TrainBatch]:
        """Return the micro-batches of one optimizer step; by default these trajectories are all of it.

        Each token record of a trajectory is a separate sequence whose tokens have the weight of the whole trajectory's.
        Records are numbered over all trajectories, including those that are not packed.
        Trajectories without policy tokens do not train and are not packed; `totals` still counts them. With `whole_groups`
        the trajectories of a prompt are in the same micro-batch.
        """
        if not trajectories:
            return []
        prompts = _numbered(trajectory.group_key for trajectory in trajectories)
        policy_tokens = np.array([trajectory.num_policy_tokens for trajectory in trajectories], np.int64)
        totals = totals or totals_of(trajectories)
        weights = AGGREGATIONS[self.aggregation](policy_tokens, prompts, totals, self.constant_length)
        owners, trajectories, credits = _by_record(trajectories, credits)
        prompts, weights = prompts[owners], weights[owners]
        lengths = np.array([trajectory.num_tokens for trajectory in trajectories], np.int64)
        budget = self.budget(np.bincount(prompts, lengths).astype(int) if self.whole_groups else lengths)
        trained = [
            i for i, credit in enumerate(credits) if credit is not None and trajectories[i].num_policy_tokens
        ]
        batches = []
        for part in (
            _parts(trained, prompts, lengths, budget) if self.whole_groups else filter(None, [trained])
        ):
            chosen = [trajectories[i] for i in part]
            seen = any(span.images for trajectory in chosen for span in trajectory.spans)
            images = load("rl4llm.data.shown:Shown").of(chosen, self.positions) if seen else None
            constrained = any(span.grammar for trajectory in chosen for span in trajectory.spans)
            allowed = load(ALLOWED).of(chosen, self.tokenizer) if constrained else None
            flat = _flatten(
                chosen,
                [credits[i] for i in part],
                weights=weights[part],
                prompts=prompts[part],
                records=np.array(part, np.int64),
                image_ids=images.image_ids if images else None,
            )
            room = int(flat.lengths.max()) * len(part) if self.whole_groups else budget
            placed = LAYOUTS[self.layout](flat, room).by_batch()
            batches += [_batch(flat, images, allowed, pieces, self.pad_token_id) for pieces in placed]
        return batches


AGGREGATIONS: Registry[Callable[[Ints, Ints, StepTotals, int], Floats]] = Registry("algorithm.aggregation")
"""Loss aggregations: (policy tokens and prompt number of each trajectory, totals of the step, training.constant_length) ->
weight of one token of each trajectory in the loss."""


@AGGREGATIONS.register("token")
def _each_token_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals, length: int) -> Floats:
    """Average over all tokens of the step. Yu et al. 2025 (DAPO), section 3.3."""
    return np.full(len(policy_tokens), 1 / max(totals.tokens, 1))


@AGGREGATIONS.register("sequence")
def _each_trajectory_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals, length: int) -> Floats:
    """Average each trajectory over its tokens, then all trajectories. Shao et al. 2024 (DeepSeekMath), equation 3."""
    return 1 / (policy_tokens.clip(1) * totals.sequences)


@AGGREGATIONS.register("prompt")
def _each_prompt_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals, length: int) -> Floats:
    """Average each prompt over all tokens of its trajectories, then all prompts. Yu et al. 2025 (DAPO), equation 8."""
    return 1 / (np.bincount(prompts, weights=policy_tokens).clip(1)[prompts] * totals.prompts)


@AGGREGATIONS.register("constant")
def _constant_divisor(policy_tokens: Ints, prompts: Ints, totals: StepTotals, length: int) -> Floats:
    """Divide each trajectory's sum by a constant, then average all trajectories. Liu et al. 2025 (Dr. GRPO), section 3.2."""
    if length < 1:
        raise ConfigError(
            f"algorithm.aggregation='constant' divides by a fixed number of tokens, but training.constant_length="
            f"{length}. Set it to the number of tokens of the longest completion, 1 or more."
        )
    return np.full(len(policy_tokens), 1 / (length * totals.sequences))


def _by_record(
    trajectories: Sequence[Trajectory], credits: Sequence[Credit]
) -> tuple[list[int], list[Trajectory], list[Credit]]:
    """Return the trajectory number of each token record, and the records as trajectories with their credits."""
    owners, records, shares = [], [], []
    for i, (trajectory, credit) in enumerate(zip(trajectories, credits, strict=True)):
        start = 0
        for record in trajectory.by_record():
            turns = slice(start, start + record.num_turns)
            owners.append(i)
            records.append(record)
            shares.append(credit[turns] if isinstance(credit, Sequence) and trajectory.forks else credit)
            start = turns.stop
    return owners, records, shares


def _parts(kept: list[int], prompts: Ints, lengths: Ints, budget: int) -> list[list[int]]:
    """Return the trajectories of each micro-batch; those of a prompt stay together."""
    sizes = np.bincount(prompts[kept], weights=lengths[kept], minlength=1).astype(np.int64)
    chosen = first_fit(sizes, budget)[prompts[kept]]
    return [[kept[i] for i in np.flatnonzero(chosen == part)] for part in np.unique(chosen)]


@dataclass(frozen=True, slots=True)
class _Flat(Lengths):
    """The tokens of all trajectories, one after another."""

    group_ids: Ints
    record_ids: Ints
    token_ids: Ints
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    credits: NDArray[np.float32]
    weights: NDArray[np.float32]


def _flatten(
    trajectories: list[Trajectory],
    credits: list[Credit],
    *,
    weights: Floats,
    prompts: Ints,
    records: Ints,
    image_ids: Ints | None,
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
    owner, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    token_ids = _chained([span.token_ids for span in spans], np.int64)
    symbols = token_ids if image_ids is None else np.where(image_ids >= 0, -1 - image_ids, token_ids)
    order, shared = depth_first(np.split(symbols, starts[1:]), prompts)
    return _Flat(
        lengths=lengths,
        openings=np.flatnonzero(mask)[np.unique(owner[mask], return_index=True)[1]] - starts,
        order=order,
        shared=without_short(shared, prompts[order]),
        group_ids=prompts[owner],
        record_ids=records[owner],
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        credits=np.repeat(_span_credits(trajectories, credits), sizes).astype(np.float32),
        weights=(weights[owner] * mask).astype(np.float32),
    )


def _span_credits(trajectories: list[Trajectory], credits: list[Credit]) -> Floats:
    """Return the credit of each span's tokens: its turn's or its trajectory's, 0 for context."""
    values = []
    for trajectory, credit in zip(trajectories, credits, strict=True):
        turn, before = -1, "context"
        for span in trajectory.spans:
            turn += span.author == "policy" != before
            before = span.author
            value = credit[turn] if isinstance(credit, Sequence) and span.author == "policy" else credit
            values.append(value if span.author == "policy" else 0.0)
    return np.array(values, float)


def _numbered(keys: Iterable[object]) -> Ints:
    """Return equal numbers for equal keys, from 0 in the order of appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _chained(parts: list[tuple[float, ...]], dtype: type) -> NDArray[Any]:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype, count=sum(map(len, parts)))


def _batch(flat: _Flat, shown: Any, allowed: Any, pieces: Pieces, pad_token_id: int) -> TrainBatch:
    rows, columns = int(pieces.row.max()) + 1, int((pieces.column + pieces.length).max())
    # Pieces become arrays with an entry for each token, so that Python loops over no tokens. `source` is its place in
    # `flat`, `target` its place in the rows, which are laid end to end.
    begins = np.cumsum(pieces.length) - pieces.length
    within = np.arange(int(pieces.length.sum())) - np.repeat(begins, pieces.length)
    column = np.repeat(pieces.column, pieces.length) + within
    target = np.repeat(pieces.row * columns, pieces.length) + column
    source = np.repeat(pieces.source, pieces.length) + within

    def spread(values: NDArray[Any], fill: int = 0) -> Tensor:
        out = np.full((rows * columns, *values.shape[1:]), fill, values.dtype)
        out[target] = values
        return torch.from_numpy(out.reshape(rows, columns, *values.shape[1:]))

    images, numbers = shown.features(source) if shown else ((), None)
    axes = shown.axes if shown and images else None
    computed = _computed_columns(pieces) if pieces.shared.any() else None
    allowed_ids, allowed_CW = (allowed and allowed.within(source)) or (None, None)
    return TrainBatch(
        token_ids_BT=spread(flat.token_ids[source], pad_token_id),
        position_ids_BT=spread(np.repeat(pieces.position, pieces.length) + within),
        segment_ids_BT=spread(np.repeat(pieces.segment, pieces.length)),
        mask_BT=spread(flat.mask[source]),
        sampled_logprobs_BT=spread(flat.logprobs[source]),
        credits_BT=spread(flat.credits[source]),
        weights_BT=spread(flat.weights[source]),
        computed_BT=None if computed is None else spread(computed, NEVER),
        group_ids_BT=spread(flat.group_ids[source], NEVER),
        record_ids_BT=spread(flat.record_ids[source], NEVER),
        axes_BTA=None if axes is None else spread(axes[source]),
        feature_ids_BT=spread(numbers, NEVER) if images and numbers is not None else None,
        allowed_ids_BT=None if allowed_ids is None else spread(allowed_ids, NEVER),
        allowed_CW=allowed_CW,
        images=images,
    )


def _computed_columns(pieces: Pieces) -> Ints:
    """Return the column of the token that is computed for each token of the pieces."""
    columns: list[Ints] = []
    record = np.zeros(0, np.int64)  # the columns of all its tokens, also of those without a place
    for column, length, position, shared in zip(
        pieces.column, pieces.length, pieces.position, pieces.shared, strict=True
    ):
        own = column - position + np.arange(shared, position + length)
        record = np.concatenate([record[:shared], own])
        columns.append(record[position:])
    return np.concatenate(columns)


def filler(pad_token_id: int) -> TrainBatch:
    """Return a micro-batch of two context tokens, which trains nothing."""
    ids_BT, zeros_BT = torch.full((1, 2), pad_token_id), torch.zeros(1, 2)
    return TrainBatch(
        token_ids_BT=ids_BT,
        position_ids_BT=torch.arange(2)[None],
        segment_ids_BT=torch.ones_like(ids_BT),
        mask_BT=torch.zeros(1, 2, dtype=torch.bool),
        sampled_logprobs_BT=zeros_BT,
        credits_BT=zeros_BT.clone(),
        weights_BT=zeros_BT.clone(),
        group_ids_BT=ids_BT.clone().fill_(-1),
    )
