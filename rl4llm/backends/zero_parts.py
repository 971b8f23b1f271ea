"""Tensors that DeepSpeed has cut into parts, one for each rank: where a part lies, and all of it put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole, which ZeRO-3 keeps beside a parameter that is elsewhere."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def put_together(parameter: Any) -> Tensor:
    """All of a parameter that ZeRO-3 has cut into equal parts, padded at the end.

    Takes no more memory than the result, where DeepSpeed's own way needs twice as much over gloo.
    """
    own, group = parameter.ds_tensor, parameter.ds_process_group
    found = own.new_empty(own.numel() * dist.get_world_size(group), device=parameter.device)
    for rank, part in enumerate(found.split(own.numel())):
        if rank == dist.get_rank(group):
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return found[: parameter.ds_numel].view(parameter.ds_shape)


def place_of(parameter: Any) -> tuple[int, int]:
    """Where this rank's part of the fp32 weight begins, and how many numbers it has."""
    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.ds_numel
        start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return start, min(size, parameter.ds_numel - start)
    mapping = parameter._hp_mapping
    return (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)


def has_equal_parts(parameter: Any) -> bool:
    """False where ZeRO-3 has padded the last parts, since the ranks cannot share the numbers evenly."""
    return not hasattr(parameter, "ds_id") or parameter.ds_numel % dist.get_world_size(parameter.ds_process_group) == 0


def own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, padded as ZeRO-3 pads it."""
    start, count = place_of(parameter)
    return F.pad(whole.flatten()[start : start + count], (0, parameter.ds_tensor.ds_numel - count))


def sent_to_first(part: Tensor, places: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Tensor:
    """A tensor of which each rank holds the numbers at its place: whole on the first one, elsewhere that rank's part."""
    rank, numel = dist.get_rank(), math.prod(shape)
    part = part[: places[rank][1]]
    if rank > 0:
        if len(part):
            dist.send(part, 0)
        return part
    if len(part) == numel:
        return part.view(shape)
    found = part.new_empty(numel)
    for other, (start, count) in enumerate(places):
        if other == 0:
            found[start : start + count] = part
        elif count:
            dist.recv(found[start : start + count], other)
    return found.view(shape)
