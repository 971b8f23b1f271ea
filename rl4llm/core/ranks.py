"""The processes that train together: who am I, how many are we, and the few things that we tell each other.

One process is the special case of one rank, so nothing asks whether training is distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl4llm.core.errors import ConfigError, RanksError

T = TypeVar("T")
LATER_S = 60.0  # the watchdog, which says more, speaks first


class Ranks:
    """One process that trains alone; subclassed by one of many.

    Every method that speaks with the others has to be called by all of them, in the same order.
    """

    rank = 0
    size = 1
    waits = False  # for the others, in one of these methods

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files, talks to servers and shows progress."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return tensor

    def largest(self, number: int) -> int:
        """The largest over all ranks."""
        return number

    def share(self, value: T | None) -> T:
        """What the first rank says, on every rank; what the others give does not matter."""
        return cast(T, value)

    def spread(self, tensor: Tensor) -> None:
        """Put into the tensor what it holds on the first rank."""

    def gather(self, value: T) -> list[T]:
        """What every rank says, by rank; on the first one only, elsewhere empty."""
        return [value]

    def wait(self) -> None:
        """Go on when all are here."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where the others are lost in there, in a backward pass too, that is what the error says."""
        yield

    def close(self) -> None:
        """Leave the group."""

    def merge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of an optimizer step over all ranks: "loss" and "update/tokens" add up, names in "/max" take the maximum,
        all others are means over the policy's tokens. Ranks may lack some."""
        return dict(metrics)


class DistributedRanks(Ranks):
    """One of several processes that `torchrun`, `deepspeed` or `accelerate launch` started."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def total(self, tensor: Tensor) -> Tensor:
        summed = tensor.detach().cpu().clone()  # numbers travel on the CPU: gloo is always there
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
        own = tensor.detach().contiguous()
        self._speak(dist.broadcast, own.view(-1).view(torch.uint8), 0)  # gloo does not know every dtype
        tensor.detach().copy_(own)

    def gather(self, value: T) -> list[T]:
        box: list[Any] | None = [None] * self.size if self.is_first else None
        self._speak(dist.gather_object, value, box)
        return box or []

    def wait(self) -> None:
        self._speak(dist.barrier)

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _of_the_network(error):
                raise
            raise self._lost(error) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def merge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        everyone: list[dict[str, float]] = [{}] * self.size
        self._speak(dist.all_gather_object, everyone, dict(metrics))
        merged = _merged(everyone)
        return {name: merged[name] for name in (*metrics, *(name for name in merged if name not in metrics))}

    def _speak(self, call: Any, *args: Any) -> None:
        self.waits = True
        try:
            call(*args)
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self.waits = False

    def _lost(self, error: RuntimeError) -> RanksError:
        return RanksError(
            f"Rank {self.rank} of {self.size} lost the others: {str(error).strip().splitlines()[0]} One died or "
            "hangs; its own output says why. The same command goes on from the last checkpoint."
        )


def join_ranks(timeout_s: float, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Join the processes that a launcher started, as its environment variables say; without a launcher, be alone.

    `timeout_s` is how long the others are waited for. Raises ConfigError for variables that do not belong together.
    """
    if dist.is_initialized():
        return DistributedRanks() if dist.get_world_size() > 1 else Ranks()
    size = environ.get("WORLD_SIZE", "1")
    if not size.isdigit() or int(size) < 1:
        raise ConfigError(f"WORLD_SIZE={size!r} is not accepted: 1 or above, as torchrun and deepspeed set it.")
    if int(size) == 1:
        _check_alone(environ)
        return Ranks()
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={size}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Use torchrun, "
            "deepspeed or accelerate launch, or unset WORLD_SIZE to train with one process."
        )
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + LATER_S))
    except RuntimeError as error:
        raise RanksError(
            f"Rank {environ['RANK']} of {size} did not find the others through {environ['MASTER_ADDR']}:"
            f"{environ['MASTER_PORT']}: {str(error).strip().splitlines()[0]} All of them must run, and reach that address. "
            "Where a machine has several networks, set GLOO_SOCKET_IFNAME to the interface, as `rl4llm launch` does."
        ) from error
    return DistributedRanks()


def _of_the_network(error: RuntimeError) -> bool:
    """Whether it comes from a collective: NCCL's and the store's errors have a class, gloo's only name their source file."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _check_alone(environ: Mapping[str, str]) -> None:
    """`accelerate launch --cpu` prepares for several processes but starts one, which would train alone without a word."""
    if "WORLD_SIZE" not in environ and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= environ.keys():
        raise ConfigError(
            "`accelerate launch --cpu` starts one process, whatever --num_processes says. Use --multi_gpu instead of --cpu, "
            "which needs no GPU, or leave --num_processes out."
        )


def _merged(everyone: list[dict[str, float]]) -> dict[str, float]:
    """`Ranks.merge`, from what every rank says."""
    tokens = [metrics.get("update/tokens", 0.0) for metrics in everyone]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in everyone for name in metrics):
        there = [(metrics[name], count) for metrics, count in zip(everyone, tokens, strict=True) if name in metrics]
        if name in ("loss", "update/tokens"):
            merged[name] = sum(value for value, _ in there)
        elif name.endswith("/max"):
            merged[name] = max(value for value, _ in there)
        else:
            merged[name] = sum(value * count for value, count in there) / max(sum(count for _, count in there), 1e-9)
    return merged
