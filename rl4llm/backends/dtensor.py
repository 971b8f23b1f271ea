"""Tensors that may be sharded over the ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if it is sharded, every rank must call this.

    This needs no more memory than the result: each rank's rows go to their place in it, while `full_tensor` collects them in
    other buffers first and needs two to three times as much.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (Shard(0),):
        return tensor.full_tensor()
    group, own = tensor.device_mesh.get_group(), tensor.to_local()
    found = own.new_empty(tensor.shape)
    height = -(-len(found) // group.size())
    for rank, rows in enumerate(found.split(height)):
        if rank == group.rank():
            rows.copy_(own)
        dist.broadcast(rows, dist.get_global_rank(group, rank), group=group)
    return found


def part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy of the part of a whole tensor that this rank holds of `like`; no rank waits."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device, copy=True)
    placed = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to(like.device)


def put(own: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank waits."""
    part(own).copy_(part(part_like(tensor, own)) if isinstance(own, DTensor) else tensor)
