"""The files of a version: which tensors go into which, and that they are the model's own and finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl4llm.core.errors import WeightsError
from rl4llm.core.tensor_file import write_tensors
from rl4llm.core.types import TensorSpec


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Runs of tensors of at most `shard_bytes` together; a larger tensor stands alone."""
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def write_shard(path: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Write the next tensors of `tensors`, which must be those of `specs`; returns the file's xxh3_64.

    Raises WeightsError for one that is missing, another, of another shape or dtype, or not finite, and OSError.
    """
    return write_tensors(path, specs, _checked(specs, tensors))


def check_tensors(specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Raise WeightsError when `tensors` are not exactly those of `specs`, or hold what is not finite."""
    for _ in _checked(specs, tensors):
        pass
    check_ended(tensors)


def check_ended(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Raise WeightsError when there is a tensor more."""
    extra = next(tensors, None)
    if extra is not None:
        raise WeightsError(f"The weights hold {extra[0]}, which the model's list of tensors does not have.")


def _checked(specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The next tensors of `tensors`, one for each spec."""
    for spec in specs:
        name, tensor = _matching(spec, next(tensors, None))
        _check_finite(name, tensor)
        yield name, tensor


def _matching(spec: TensorSpec, given: tuple[str, Tensor] | None) -> tuple[str, Tensor]:
    if given is None:
        raise WeightsError(f"The weights lack {spec}; they end before it.")
    found = TensorSpec.of(*given)
    if found != spec:
        raise WeightsError(f"The weights hold {found} where the model's list of tensors has {spec}.")
    return given


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor.detach())  # NaN wins over every number, so two numbers tell of all
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise WeightsError(
            f"{name} holds {int((~torch.isfinite(tensor)).sum()):,} values that are not finite. The weights are not "
            "published; the last version stays. Next: resume from a checkpoint before it, with a lower training.lr."
        )
