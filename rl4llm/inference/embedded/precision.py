"""The trainer's precision in the engine: models and products for autocast without casts, and a reference in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl4llm.runtime.cpu import PackedLinear, linear


class AutocastCopy:
    """A copy of a model for decoding under autocast. It has its own weights of linear layers, in autocast's dtype.

    Autocast casts these weights in each pass, which for one token takes longer than the products. All other parameters and
    buffers are those of the original, so that both compute the same numbers. Call `refresh` when weights have changed.
    """

    def __init__(self, original: nn.Module, dtype: torch.dtype):
        self._original = original
        shared = {id(tensor): tensor for tensor in (*original.parameters(), *original.buffers())}
        self.model = copy.deepcopy(original, shared)
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        for module in [module for module in self.model.modules() if isinstance(module, nn.Linear)]:
            for name, source in list(module.named_parameters(recurse=False)):
                cast = nn.Parameter(source.detach().to(dtype), requires_grad=False)
                setattr(module, name, self._pairs.setdefault(source, cast))
        self._parts = _parts(original)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights of linear layers again."""
        for source, cast in self._pairs.items():
            cast.copy_(source)

    def mirrors(self, model: nn.Module) -> bool:
        """Return whether `model` is the original with the modules and parameters that it had."""
        return model is self._original and _parts(model) == self._parts


class Projections:
    """The projections of one input. Copied weights make one product, and `refresh` copies them when they have changed.

    Autocast casts weights in each pass, which for one token per row takes longer than the products.
    """

    def __init__(self, modules: Sequence[Any], autocast: torch.dtype | None):
        self.weights = [module.weight for module in modules]
        self.biases = [module.bias for module in modules]
        self._sizes = [len(weight) for weight in self.weights]
        self._autocast = autocast
        self._copied: PackedLinear | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again if this computes in another dtype than theirs."""
        if self._autocast is None:
            return
        weight = torch.cat([weight.to(self._autocast) for weight in self.weights])
        bias: Tensor | None = None
        if any(bias is not None for bias in self.biases):
            parts = zip(self.weights, self.biases, strict=True)
            bias = torch.cat(
                [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
            )
        self._copied = PackedLinear(weight, None if bias is None else bias.to(self._autocast))

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self._copied is not None:
            return self._copied(x.to(self._autocast)).split(self._sizes, dim=-1)
        return [linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]


def _parts(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return what a copy depends on: modules and parameters, and where these are."""
    modules = [(id(module),) for module in model.modules()]
    return [*modules, *((id(item), item.dtype, item.device) for item in model.parameters())]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 inside, one module's parameters at a time, so that no second model is in memory."""

    def widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in module.parameters(recurse=False):
            narrow.setdefault(id(parameter), parameter.data)
            parameter.data = parameter.data.float()
        return tuple(
            item.float() if isinstance(item, Tensor) and item.is_floating_point() else item for item in inputs
        )

    def restore(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = narrow.pop(id(parameter), parameter.data)

    narrow: dict[int, Tensor] = {}
    hooks = [
        hook
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
        for hook in (
            module.register_forward_pre_hook(widen),
            module.register_forward_hook(restore, always_call=True),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
