"""The trainer's precision in the engine: models and products for autocast without casts, and a reference in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.core.images import IMAGE_SIDE
from rl4llm.runtime.cpu import PackedLinear, linear
from rl4llm.runtime.quantized import QuantizedLinear


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
        linears = [item for item in self.model.named_modules() if isinstance(item[1], nn.Linear)]
        for module in [module for name, module in linears if not name.startswith(IMAGE_SIDE)]:
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


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer: scaling * up (down x). `down` is (R, D_in), `up` is (D_out, R)."""

    down: Tensor
    up: Tensor
    scaling: float


def adapted(module: Any) -> tuple[Any, LowRank | None]:
    """Return a linear layer and its LoRA adapter of PEFT; the module itself and None if it has none, or an unusual one."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return module, None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1 or module.disable_adapters or module.merged or names[0] in module.lora_variant:
        return module, None
    (name,) = names
    if module.lora_B[name].bias is not None:
        return module, None
    matrices = module.lora_A[name].weight, module.lora_B[name].weight
    return module.base_layer, LowRank(*matrices, float(module.scaling[name]))


class Projections:
    """The projections of one input. Copied weights make one product, and `refresh` copies them when they have changed.

    Autocast casts weights in each pass, which for one token per row takes longer than the products. The products of
    adapters are added; on copies that takes two products for all of them. Weights in 4 bits are not copied, which would take
    four times their memory, but dequantized in each pass.
    """

    def __init__(self, modules: Sequence[Any], autocast: torch.dtype | None):
        plain, lows = zip(*map(adapted, modules), strict=True)
        self._plain = plain
        self._dequantizes = any(isinstance(module, QuantizedLinear) for module in plain)
        self.weights = [_stored(module) for module in plain]
        self.biases = [module.bias for module in plain]
        self._lows: tuple[LowRank | None, ...] = lows
        self._sizes = [module.out_features for module in plain]
        self._autocast = autocast
        self._copied: PackedLinear | None = None
        self._low: tuple[Tensor, Tensor] | None = None

    def read(self) -> list[Tensor | float | None]:
        """Return all that is read of the modules: tensors, and the scaling of adapters."""
        return [*self.weights, *self.biases, *(item for low in self._lows if low for item in low)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again if this computes in another dtype than theirs."""
        if self._autocast is None:
            return
        if not self._dequantizes:
            weight_ND = torch.cat([weight.to(self._autocast) for weight in self.weights])
            parts = zip(self.weights, self.biases, strict=True)
            zeros = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
            bias_N = torch.cat(zeros).to(self._autocast) if any(x is not None for x in self.biases) else None
            self._copied = PackedLinear(weight_ND, bias_N)
        if any(self._lows):
            self._low = self._joined_lows(self._autocast)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self._autocast is not None:
            x = x.to(self._autocast)
            y = self._dequantized(x) if self._copied is None else self._copied(x)
            if self._low is not None:
                down_RD, up_NR = self._low
                y = y + F.linear(F.linear(x, down_RD), up_NR)
            return y.split(self._sizes, dim=-1)
        parts = zip(self._plain, self.biases, self._lows, strict=True)
        return [_adapt(linear(x, module.weight, bias), x, low) for module, bias, low in parts]

    def _dequantized(self, x: Tensor) -> Tensor:
        parts = zip(self._plain, self.biases, strict=True)
        biased = (
            (module.weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)) for module, bias in parts
        )
        return torch.cat([F.linear(x, weight, bias) for weight, bias in biased], dim=-1)

    def _joined_lows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return one `down` for all adapters, and one `up` with theirs as blocks, which includes the scaling."""
        lows = [low for low in self._lows if low is not None]
        down_RD = torch.cat([low.down for low in lows]).to(dtype)
        up_NR, row, column = down_RD.new_zeros(sum(self._sizes), len(down_RD)), 0, 0
        for size, low in zip(self._sizes, self._lows, strict=True):
            if low is not None:
                rank = low.up.shape[1]
                up_NR[row : row + size, column : column + rank] = low.up * low.scaling
                column += rank
            row += size
        return down_RD, up_NR


def _stored(module: Any) -> Tensor:
    """Return the tensor that a layer keeps its weight in."""
    stored: Tensor = getattr(module, "packed" if isinstance(module, QuantizedLinear) else "weight")
    return stored


def _adapt(y: Tensor, x: Tensor, low: LowRank | None) -> Tensor:
    if low is None:
        return y
    return (y + linear(linear(x.to(low.down.dtype), low.down), low.up) * low.scaling).to(y.dtype)


def _parts(model: nn.Module) -> list[tuple[Any, ...]]:
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
