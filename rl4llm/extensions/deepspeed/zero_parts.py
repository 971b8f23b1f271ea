"""Tensors that DeepSpeed has sharded over the ranks: where a part lies, and how to gather the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, which ZeRO-3 stores on a sharded parameter."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def put_together(parameter: Any) -> Tensor:
    """Gather a parameter that ZeRO-3 has cut into equal parts, padded at the end.

    It takes no more memory than the result; DeepSpeed's method needs twice as much over gloo.
    """
    own, group = parameter.ds_tensor, parameter.ds_process_group
    found = own.new_empty(own.numel() * dist.get_world_size(group), device=parameter.device)
    for rank, part in enumerate(found.split(own.numel())):
        if rank == dist.get_rank(group):
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return found[: parameter.ds_numel].view(parameter.ds_shape)


def place_of(parameter: Any) -> tuple[int, int]:
    """Return where this rank's part of the fp32 weight starts, and its number of values."""
    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.ds_numel
        start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return start, min(size, parameter.ds_numel - start)
    mapping = parameter._hp_mapping
    return (
        (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)
    )


def has_equal_parts(parameter: Any) -> bool:
    """Return False if ZeRO-3 has padded the last parts because the size is not divisible by the number of ranks."""
    return (
        not hasattr(parameter, "ds_id")
        or parameter.ds_numel % dist.get_world_size(parameter.ds_process_group) == 0
    )


def own_part(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, padded like ZeRO-3 pads it."""
    start, count = place_of(parameter)
    return F.pad(whole.flatten()[start : start + count], (0, parameter.ds_tensor.ds_numel - count))


def sent_to_first(part: Tensor, places: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Tensor:
    """Send each rank's part to the first rank; return the whole tensor there, elsewhere the rank's part."""
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
