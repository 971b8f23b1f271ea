"""Sums and scans over the policy's tokens of each trajectory, wherever packing has placed them.

The tokens of a trajectory are in one segment of one row (see `TrainBatch`), in order. The environment's tokens between
them are skipped: they neither count nor discount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.core.types import TrainBatch


def sequence_sum(x_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Return the sum of `x_BT` over a trajectory at each of its policy tokens (B, T), 0 elsewhere; differentiable."""
    ids_BT, count = _sequence_ids(batch)
    ids_N = ids_BT[batch.mask_BT]
    sums_S = x_BT.new_zeros(count).index_add(0, ids_N, x_BT[batch.mask_BT])
    return torch.zeros_like(x_BT).masked_scatter(batch.mask_BT, sums_S[ids_N])


def sequence_mean(x_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Return the mean of `x_BT` over a trajectory at each of its policy tokens (B, T), 0 elsewhere; differentiable."""
    return sequence_sum(x_BT, batch) / sequence_sum(torch.ones_like(x_BT), batch).clamp(min=1)


def pair_difference(x_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Return chosen minus rejected `x_BT` of its group at each of the policy's tokens (B, T), 0 elsewhere; differentiable.

    `x_BT` is equal at all tokens of a trajectory, as from `sequence_sum`. The sign of the credit tells the side of a
    trajectory. Both sides must be in the same batch (`Needs.whole_groups`). If a side has several token records, as after
    a rewritten history, their mean counts.
    """
    mask_BT = batch.mask_BT
    assert batch.group_ids_BT is not None  # `pack` numbers them
    _, pair_N = batch.group_ids_BT[mask_BT].unique(return_inverse=True)
    signs_N, x_N = batch.credits_BT[mask_BT].sign(), x_BT[mask_BT]
    share_N = 1 / sequence_sum(torch.ones_like(x_BT), batch)[mask_BT]  # adds up to 1 over each trajectory
    zeros_P = x_BT.new_zeros(int(pair_N.max()) + 1 if len(pair_N) else 0)

    def side(sign: int) -> Tensor:
        counted_N = share_N * (signs_N == sign)
        return zeros_P.index_add(0, pair_N, counted_N * x_N) / zeros_P.index_add(0, pair_N, counted_N)

    difference_P = side(1) - side(-1)
    return torch.zeros_like(x_BT).masked_scatter(mask_BT, difference_P[pair_N])


def policy_tokens(batches: Sequence[TrainBatch], values: Sequence[Tensor]) -> Tensor:
    """Return the values at the policy's tokens of all batches (N,), float64; empty on a rank without batches."""
    tokens = [values_BT[batch.mask_BT].double() for batch, values_BT in zip(batches, values, strict=True)]
    return torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.float64)


def turn_ends(batch: TrainBatch) -> Tensor:
    """Return True at the last token of each turn of the policy (B, T)."""
    segments_BT = batch.segment_ids_BT
    goes_on_BT = F.pad(batch.mask_BT[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1]), (0, 1))
    return batch.mask_BT & ~goes_on_BT


@dataclass(frozen=True, slots=True)
class Sequences:
    """The policy's tokens of S trajectories as rows (S, L), each in order and padded on the right."""

    source_SL: Tensor  # place in the flattened batch
    mask_SL: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, batch: TrainBatch) -> Sequences:
        ids_BT, _ = _sequence_ids(batch)
        place_N = batch.mask_BT.flatten().nonzero().squeeze(1)
        _, owner_N, lengths_S = ids_BT.flatten()[place_N].unique(return_inverse=True, return_counts=True)
        order_N = owner_N.argsort(stable=True)
        starts_S = lengths_S.cumsum(0) - lengths_S
        owner_N = owner_N[order_N]
        column_N = torch.arange(len(order_N), device=order_N.device) - starts_S[owner_N]
        width = int(lengths_S.max()) if len(lengths_S) else 0
        source_SL = torch.zeros(len(lengths_S), width, dtype=torch.long, device=order_N.device)
        source_SL[owner_N, column_N] = place_N[order_N]
        mask_SL = torch.arange(width, device=order_N.device) < lengths_S[:, None]
        return cls(source_SL, mask_SL, batch.mask_BT.shape)

    @property
    def lengths_S(self) -> Tensor:
        return self.mask_SL.sum(1)

    def gather(self, x_BT: Tensor) -> Tensor:
        """Return (S, L) from (B, T), float64, 0 in the padding."""
        return x_BT.flatten()[self.source_SL].double().masked_fill(~self.mask_SL, 0.0)

    def scatter(self, x_SL: Tensor, like_BT: Tensor) -> Tensor:
        """Return (B, T) from (S, L), in the dtype of `like_BT`, 0 at all other tokens."""
        out = torch.zeros_like(like_BT).flatten()
        out[self.source_SL[self.mask_SL]] = x_SL[self.mask_SL].to(out.dtype)
        return out.view(self.shape)


def discounted_sums(x_SL: Tensor, decay_S1: Tensor | float) -> Tensor:
    """Return y_t = x_t + decay y_{t+1} along each row (S, L).

    It doubles the reach: after n rounds y_t sums 2^n terms, so 16,000 tokens take 14 rounds instead of a loop.
    """
    reach, sums_SL = 1, x_SL
    while reach < x_SL.shape[1]:
        ahead_SL = F.pad(sums_SL[:, reach:], (0, reach))
        sums_SL = sums_SL + decay_S1**reach * ahead_SL
        reach *= 2
    return sums_SL


def _sequence_ids(batch: TrainBatch) -> tuple[Tensor, int]:
    """Return a number for each segment of each row (B, T), and the count of possible numbers."""
    rows, width = batch.segment_ids_BT.shape[0], int(batch.segment_ids_BT.max()) + 1
    rows_B1 = torch.arange(rows, device=batch.segment_ids_BT.device)[:, None]
    return rows_B1 * width + batch.segment_ids_BT, rows * width
