"""Tensors of which each rank may hold a part."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is sharded, every rank has to ask for it.

    Takes no more memory than the result: each rank's rows go to their place in it, while `full_tensor` collects them in
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
