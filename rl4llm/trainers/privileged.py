"""The log-probs of a reference that reads other prompts, at the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl4llm.core.types import TrainBatch, Trajectory

Pack = Callable[[Sequence[Trajectory]], Sequence[TrainBatch]]
Score = Callable[[TrainBatch], Tensor]


def fill_reference(
    batches: Sequence[TrainBatch], trajectories: Sequence[Trajectory], pack: Pack, score: Score
) -> None:
    """Set `ref_logprobs_BT` of the batches of these trajectories; it is NaN in records that the reference does not read.

    The n-th token that the policy sampled in a record is the n-th in what the reference reads for it.
    """
    records = [(one, i) for one in trajectories for i in range(len(one.records))]
    read = [one.privileged[i] if one.privileged else None for one, i in records]
    pairs = [(one, spans) for (one, _), spans in zip(records, read, strict=True) if spans]
    packed = pack([replace(one, spans=spans, forks=(), turn_rewards=()) for one, spans in pairs])
    numbers_N = torch.cat([torch.zeros(0), *(score(batch)[batch.mask_BT] for batch in packed)])
    numbers_N = numbers_N[_places(packed).argsort()]
    places_P = _places(batches)
    read_P = torch.tensor([spans is not None for spans in read], dtype=torch.bool)[places_P >> 32]
    ref_P = numbers_N.new_full(places_P.shape, torch.nan)
    ref_P[read_P] = numbers_N[places_P[read_P].argsort().argsort()]
    parts = ref_P.split([int(batch.mask_BT.sum()) for batch in batches])
    for batch, part in zip(batches, parts, strict=True):
        batch.ref_logprobs_BT = part.new_zeros(batch.mask_BT.shape).masked_scatter(batch.mask_BT, part)


def _places(batches: Sequence[TrainBatch]) -> Tensor:
    """Return a number for each sampled token of these batches that grows with its record and with its place in this."""
    places = [torch.zeros(0, dtype=torch.long)]
    for batch in batches:
        if batch.record_ids_BT is not None:  # fillers have no records
            places.append((batch.record_ids_BT << 32 | batch.position_ids_BT)[batch.mask_BT])
    return torch.cat(places)
