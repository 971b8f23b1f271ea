"""What a chosen trajectory has over the rejected one of its prompt, wherever packing has put the two."""

from __future__ import annotations

import torch
from torch import Tensor

from rl4llm.algorithms.sequences import sequence_sum
from rl4llm.core.types import TrainBatch


def pair_difference(x_BT: Tensor, batch: TrainBatch) -> Tensor:
    """At each of the policy's tokens, `x_BT` of its group's chosen trajectory less that of the rejected; 0 elsewhere.

    `x_BT` is the same at all tokens of a trajectory, as `sequence_sum` makes it. The sign of the credit says which side a
    trajectory is on. Both stand in the same batch (`Needs.whole_groups`). Where several are on a side, as when a batch holds
    the same pair twice, it is the mean of that side. Differentiable.
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
