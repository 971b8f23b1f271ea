"""What a batch holds, and who fills what it does not hold yet."""

from dataclasses import replace

import pytest
import torch

from rl4llm.algorithms import ALGORITHMS
from rl4llm.core.errors import DataError
from rl4llm.core.types import TrainBatch


def packed():
    ids_BT, zeros_BT = torch.ones(1, 3, dtype=torch.long), torch.zeros(1, 3)
    return TrainBatch(ids_BT, ids_BT, ids_BT, ids_BT.bool(), zeros_BT, zeros_BT, zeros_BT)


def test_reading_an_unfilled_tensor_raises():
    batch = packed()
    for name in ("ref_logprobs_BT", "values_BT", "advantages_BT"):
        with pytest.raises(DataError):
            getattr(batch, name)
    with pytest.raises(DataError):  # not an error of tensors, deep in a formula
        ALGORITHMS["grpo"]().token_losses(batch, torch.zeros(1, 3), None)


def test_a_batch_holds_what_was_filled_and_nothing_else():
    batch, given = packed(), torch.full((1, 3), 0.5)
    assert "advantages_BT" not in batch.tensors()
    batch.advantages_BT = given
    assert batch.advantages_BT is batch.tensors()["advantages_BT"] is given
    doubled = batch.map(lambda x: x + x)
    assert (
        doubled.advantages_BT.tolist() == [[1.0] * 3] and doubled.tensors().keys() == batch.tensors().keys()
    )
    changed = replace(batch, mask_BT=batch.mask_BT)
    changed.advantages_BT = 2 * given
    assert batch.advantages_BT is given  # a copy has its own
