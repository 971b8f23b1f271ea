"""An adapter whose parameters, and those of its base model, may be sharded by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl4llm.backends.lora import LoraAdapter
from rl4llm.core.base_backend import BaseAdapter
from rl4llm.core.types import TensorSpec
from rl4llm.extensions.deepspeed.zero_parts import whole_shape
from rl4llm.runtime.ranks import Ranks


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
        return [
            TensorSpec(spec.name, whole_shape(own), own.dtype)
            for spec, own in zip(self._inner.specs(), self._own, strict=True)
        ]

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
