"""Tensors of which each rank may hold a part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is sharded, every rank has to ask for it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor what this rank would hold if it were sharded like `like`, in memory of its own; no rank waits."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device, copy=True)
    placed = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to(like.device)


def put(own: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank waits."""
    part(own).copy_(part(part_like(tensor, own)) if isinstance(own, DTensor) else tensor)
