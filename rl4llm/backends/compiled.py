"""A model's layers through `torch.compile`: what stands between matrix products becomes a few kernels.

Only batches that run as one row are compiled, by code that serves any number of tokens. Attention stays outside, since it
reads the lengths of a row's trajectories. With gradient checkpointing, what is computed again is compiled code.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.attention import (
    STREAM_ATTENTION,
    STREAM_EAGER,
    stream_attention,
    stream_or_eager_attention,
)
from rl4llm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from rl4llm.backends.runner import TokenNumbers

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Accepted relative difference of log-probs and gradients, by the dtype of the products."""

NARROW = 0.1  # for any other dtype

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Fused kernels round where separate ones do, so that the engine, which is not compiled, computes the same numbers."""

TRIED = 8  # of the smallest parameters, whose gradients are compared
FAILURES = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def compile_layers(numbers: TokenNumbers, ranks: Ranks) -> str:
    """Compile the layers of a model; return why they stay as they are, "" if they are compiled.

    A few tokens are computed both ways. Layers that cannot be compiled, or then give other numbers, stay.
    """
    layers = [module for module in numbers.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not numbers.runner.streams or not layers:
        return numbers.runner.padded_since or "transformers marks none of its modules as a layer"
    if ranks.size > 1:
        return "several processes train the model, for which it was not tried"
    plain = [type(layer) for layer in layers]
    reason = _objection(numbers, layers)
    if reason:
        for layer, kind in zip(layers, plain, strict=True):
            layer.__class__ = kind
    return reason


def _objection(numbers: TokenNumbers, layers: Sequence[nn.Module]) -> str:
    """Compile the layers; return what is wrong with them then, "" if they give the numbers that they gave before."""
    expected = _tried(numbers)
    try:
        _compile(layers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice of torch's compiler to its developers
            found = _tried(numbers)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return str(error).strip().partition("\n")[0]
    accepted = NARROW if numbers.autocast else CLOSE.get(numbers.model.dtype, NARROW)
    differs = max(_difference(*pair) for pair in zip(found, expected, strict=True))
    return "" if differs <= accepted else f"compiled layers give numbers that differ by {differs:.1e}"


def _compile(layers: Sequence[nn.Module]) -> None:
    own = {STREAM_ATTENTION: stream_attention, STREAM_EAGER: stream_or_eager_attention}
    for name, function in own.items():
        AttentionInterface.register(name, torch.compiler.disable(function))
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _compiled(kind)


@functools.cache
def _compiled(kind: type) -> type:
    """Return a layer's class whose `forward` is compiled for streams; for anything else it is the class's own."""
    plain: Any = kind.forward  # type: ignore[attr-defined]
    compiled = torch.compile(plain, dynamic=True, options=OPTIONS)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return (plain if options.get("stream") is None else compiled)(self, *args, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _tried(numbers: TokenNumbers) -> list[Tensor]:
    """Return the numbers of a few tokens, and their gradients for some small parameters."""
    trained = [parameter for parameter in numbers.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        found_BT, _ = numbers(numbers.runner.probe, 1.0, False)
        few = sorted(trained, key=Tensor.numel)[:TRIED]
        gradients = torch.autograd.grad(found_BT.sum(), few, allow_unused=True) if few else ()
    return [found_BT.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference in units of the other's."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-6))
