"""The processes that train together: their ranks, their number, and the few values that they exchange.

A single process is one rank, so no caller asks whether training is distributed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl4llm.core.errors import ConfigError, RanksError
from rl4llm.runtime import devices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)
T = TypeVar("T")
LATER_S = 60.0  # so that the watchdog, whose report has more detail, fires first


class Ranks:
    """A process that trains alone; the subclass is one of several.

    All ranks must call the methods that communicate, in the same order.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes files, talks to servers and shows progress."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        return tensor

    def largest(self, number: int) -> int:
        return number

    def share(self, value: T | None) -> T:
        """Return the first rank's value on every rank; the values of the others are ignored."""
        return cast(T, value)

    def spread(self, tensor: Tensor) -> None:
        """Copy the first rank's content of the tensor to all ranks, in place."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on the first rank; an empty list on the others."""
        return [value]

    def everyone(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank."""
        return [value]

    def wait(self) -> None:
        """Wait until all ranks have called this."""

    def agree(self, work: Callable[[], T], errors: tuple[type[Exception], ...], otherwise: Exception) -> T:
        """Return what `work` returns. One of these errors on any rank stops all: ranks without one raise `otherwise`."""
        try:
            result = work()
        except errors:
            self.largest(1)
            raise
        if self.largest(0):
            raise otherwise
        return result

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise RanksError if the connection to other ranks is lost inside, in a backward pass too."""
        yield

    def close(self) -> None:
        """Leave the process group."""


class DistributedRanks(Ranks):
    """One of several processes that `torchrun`, `deepspeed` or `accelerate launch` started."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def total(self, tensor: Tensor) -> Tensor:
        summed = tensor.detach().cpu().clone()  # numbers go through gloo, which always exists
        self._speak(dist.all_reduce, summed)
        return summed.to(tensor.device)

    def largest(self, number: int) -> int:
        value = torch.tensor(number)
        self._speak(dist.all_reduce, value, dist.ReduceOp.MAX)
        return int(value)

    def share(self, value: T | None) -> T:
        box: list[Any] = [value]
        self._speak(dist.broadcast_object_list, box)
        return box[0]

    def spread(self, tensor: Tensor) -> None:
        buffer = tensor.detach().contiguous()
        self._speak(dist.broadcast, buffer.view(-1).view(torch.uint8), 0)  # gloo does not support every dtype
        tensor.detach().copy_(buffer)

    def gather(self, value: T) -> list[T]:
        box: list[Any] | None = [None] * self.size if self.is_first else None
        self._speak(dist.gather_object, value, box)
        return box or []

    def everyone(self, value: T) -> list[T]:
        box: list[Any] = [None] * self.size
        self._speak(dist.all_gather_object, box, value)
        return box

    def wait(self) -> None:
        self._speak(dist.barrier)

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # A collective's: NCCL and the store have error classes, gloo names its source file.
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                raise self._lost(error) from error
            raise

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _speak(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RanksError:
        return RanksError(
            f"Rank {self.rank} of {self.size} lost the connection to the others: {str(error).strip().splitlines()[0]} "
            "One of them died or hangs; see its output. The same command resumes from the last checkpoint."
        )


def join_ranks(timeout_s: float, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Join the processes that a launcher started, by its environment variables; without a launcher, return a single rank.

    `timeout_s` is how long to wait for the others, in seconds. Raises RanksError when they cannot be reached.
    """
    if dist.is_initialized():
        return DistributedRanks() if dist.get_world_size() > 1 else Ranks()
    _warn_of_accelerate(environ)
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        _check_alone(environ)
        return Ranks()
    if (kind := devices.accelerator()) != "cpu":
        devices.call(kind, "set_device", torch.device(kind, int(environ["LOCAL_RANK"])))
    try:
        dist.init_process_group(devices.collective_backend(), timeout=timedelta(seconds=timeout_s + LATER_S))
    except RuntimeError as error:
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        raise RanksError(
            f"Rank {environ['RANK']} of {environ['WORLD_SIZE']} could not connect to {place}: "
            f"{str(error).strip().splitlines()[0]} Check that all ranks run and can reach it; with several networks, set "
            "GLOO_SOCKET_IFNAME."
        ) from error
    return DistributedRanks()


def _warn_of_accelerate(environ: Mapping[str, str]) -> None:
    """Warn that only the configuration decides about sharding and precision."""
    sharded = "true" in (environ.get("ACCELERATE_USE_FSDP"), environ.get("ACCELERATE_USE_DEEPSPEED"))
    if (sharded or environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no") and environ.get(
        "RANK", "0"
    ) == "0":
        logger.warning(
            "Sharding and precision of `accelerate launch` are ignored. Set backend.* and model.autocast."
        )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Refuse `accelerate launch --cpu`, which prepares for several processes but starts one, which would train alone."""
    if "WORLD_SIZE" not in environ and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= environ.keys():
        raise ConfigError(
            "`accelerate launch --cpu` starts one process. Use --multi_gpu instead, which needs no GPU."
        )


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if it is sharded, every rank must call this.

    This needs no more memory than the result: each rank's rows go to their place in it, while `full_tensor` collects them in
    other buffers first and needs two to three times as much.
    """
    tensor = tensor.detach()
    if not _is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Shard  # noqa: PLC0415 - slow to import

    if tensor.placements != (Shard(0),):
        return tensor.full_tensor()
    group, shard = tensor.device_mesh.get_group(), tensor.to_local()
    result = shard.new_empty(tensor.shape)
    height = -(-len(result) // group.size())
    for rank, rows in enumerate(result.split(height)):
        if rank == group.rank():
            rows.copy_(shard)
        dist.broadcast(rows, dist.get_global_rank(group, rank), group=group)
    return result


def part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy of the part of a whole tensor that this rank holds of `like`; no rank waits."""
    if not _is_sharded(like):
        return tensor.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import

    placed = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to(like.device)


def put(own: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank waits."""
    part(own).copy_(part(part_like(tensor, own)) if _is_sharded(own) else tensor)


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether ranks share a tensor; where nothing has imported its class, which takes a second, none is."""
    # a module that another thread is importing may not have it yet
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
