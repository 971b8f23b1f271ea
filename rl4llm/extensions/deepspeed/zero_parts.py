"""Tensors that DeepSpeed has sharded over the ranks: where a part lies, how to gather the whole, and adapters of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.backends.lora import LoraAdapter
from rl4llm.core.base_backend import BaseAdapter
from rl4llm.core.errors import CheckpointError
from rl4llm.core.weights import TensorSpec
from rl4llm.runtime.ranks import Ranks


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, which ZeRO-3 stores on a sharded parameter."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def put_together(parameter: Any) -> Tensor:
    """Gather a parameter that ZeRO-3 has cut into equal parts, padded at the end.

    It takes no more memory than the result; DeepSpeed's method needs twice as much over gloo.
    """
    shard, group = parameter.ds_tensor, parameter.ds_process_group
    whole = shard.new_empty(shard.numel() * dist.get_world_size(group), device=parameter.device)
    for rank, part in enumerate(whole.split(shard.numel())):
        if rank == dist.get_rank(group):
            part.copy_(shard)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return whole[: parameter.ds_numel].view(parameter.ds_shape)


class ZeroPart(NamedTuple):
    """What a rank holds of a parameter: `numel` values from `start` on.

    ZeRO-1 and 2 keep their fp32 weights at `offset` of the flat tensor of a parameter group.
    """

    start: int
    numel: int
    group: int = 0
    offset: int = 0


def part_of(parameter: Any) -> ZeroPart:
    """Return what this rank holds of a parameter.

    ZeRO-1 and 2 forget it when the states leave the device, so it must be asked before.
    """
    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.ds_numel
        start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return ZeroPart(start, min(size, parameter.ds_numel - start))
    mapping = parameter._hp_mapping
    if mapping is None:
        return ZeroPart(0, 0)
    place = mapping.lp_fragment_address
    return ZeroPart(place.start, place.numel, mapping.param_group_index, mapping.hp_fragment_address.start)


def has_equal_parts(parameter: Any) -> bool:
    """Return False if ZeRO-3 has padded the last parts because the size is not divisible by the number of ranks."""
    return bool(parameter.ds_numel % dist.get_world_size(parameter.ds_process_group) == 0)


def padded(parameter: Any, values: Tensor) -> Tensor:
    """Return this rank's part of a tensor, padded like ZeRO-3 pads it."""
    return F.pad(values, (0, parameter.ds_tensor.ds_numel - len(values)))


def sent_to_first(values: Tensor, parts: Sequence[ZeroPart], shape: tuple[int, ...]) -> Tensor:
    """Send each rank's values to the first rank; return the whole tensor there, elsewhere the rank's values."""
    rank, numel = dist.get_rank(), math.prod(shape)
    values = values[: parts[rank].numel]
    if rank > 0:
        if len(values):
            dist.send(values, 0)
        return values
    if len(values) == numel:
        return values.view(shape)
    if (count := sum(part.numel for part in parts)) != numel:
        raise CheckpointError(f"DeepSpeed holds {count:,} of {numel:,} values of a tensor.")
    whole = values.new_empty(numel)
    for source, part in enumerate(parts):
        place = whole[part.start : part.start + part.numel]
        if source == 0:
            place.copy_(values)
        elif part.numel:
            dist.recv(place, source)
    return whole.view(shape)


class GatheredAdapter(BaseAdapter):
    """An adapter on a model that may be sharded: each tensor is gathered while it is read.

    `inner` reads a parameter only when its next tensor is requested.
    """

    def __init__(
        self,
        inner: LoraAdapter,
        gathered: Callable[[Sequence[Tensor]], AbstractContextManager[Any]],
        ranks: Ranks,
    ):
        self._inner, self._gathered = inner, gathered
        self._own = [parameter for parameter in inner.model.parameters() if parameter.requires_grad]
        self._names = [name for name, _ in inner.base_parameters()]
        # while the whole model is available
        self._digest = ranks.share(inner.base_digest() if ranks.is_first else "")

    @property
    def rank(self) -> int:
        return self._inner.rank

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        inner = self._inner.weights()
        for parameter in self._own:
            with self._gathered([parameter]):
                yield next(inner)

    def specs(self) -> list[TensorSpec]:
        pairs = zip(self._inner.specs(), self._own, strict=True)
        return [TensorSpec(spec.name, whole_shape(tensor), tensor.dtype) for spec, tensor in pairs]

    def write_config(self, directory: Path) -> None:
        self._inner.write_config(directory)

    def off(self) -> AbstractContextManager[None]:
        return self._inner.off()

    def base_digest(self) -> str:
        return self._digest

    def frozen(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the frozen parameters of the model under their Hugging Face names."""
        frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
        return dict(zip(self._names, frozen, strict=True))

    @torch.no_grad()
    def merged(self, named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Yield each frozen parameter with the adapter merged into it."""
        inner = self._inner.merged_parameters()
        for name, parameter in self.frozen(named).items():
            with self._gathered([parameter, *self._inner.beside(name)]):
                yield next(inner)
