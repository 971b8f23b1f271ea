"""Records of a model's weights: where one version lies, and what each tensor is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightRef:
    """The location of one version of the weights.

    `kind` is "memory" (shared in process), "full" (a Hugging Face directory at `path`), "lora" (an adapter's directory),
    "distributed" (`tensors` yields them, for a process group). `checksums` are those of the files.
    If `held`, another rank has already sent the weights to the engine, which should report this version.
    """

    version: int
    kind: Literal["memory", "full", "lora", "distributed"] = "memory"
    path: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    tensors: Callable[[], Iterator[tuple[str, Tensor]]] | None = field(
        default=None, repr=False, compare=False
    )
    held: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The description of a weight: its Hugging Face name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
