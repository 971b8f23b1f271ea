"""Weights in 4 bits and Adam's moments in 8, through bitsandbytes, whose imports live here.

The layers of bitsandbytes choose a kernel by the number of tokens, and on some processors store the weight in another order
after the first pass. `QuantizedLinear` always multiplies by the dequantized weight, so that engine and trainer compute the
same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from rl4llm.core.errors import ModelError
from rl4llm.core.registry import needed
from rl4llm.runtime.cpu import linear

BLOCK, SMALL = 256, 4096
"""Numbers of an 8-bit moment that share a scale, and the size below which a parameter's moments stay in fp32."""

TRACES = ("hf_quantizer", "is_quantized", "is_loaded_in_4bit", "quantization_method")
"""What transformers sets on a model from quantized files; without them its methods treat the model as any other."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with its weight in NF4 and double quantization (Dettmers et al. 2023, section 3).

    `packed` has two weights per byte and `state` the scales. `weight` is not a parameter: each access dequantizes it.
    """

    def __init__(self, packed: Tensor, state: Any, bias: nn.Parameter | None, dtype: torch.dtype):
        nn.Module.__init__(self)  # that of nn.Linear would make a weight
        self.out_features, self.in_features = state.shape
        self.register_buffer("packed", packed, persistent=False)  # files hold the dequantized weight, or none
        self.register_parameter("bias", bias)
        self.state, self.state.dtype = state, dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override] # torch declares an attribute
        """Return the weight (N, D) in the model's dtype."""
        weight_ND: Tensor = _bitsandbytes().functional.dequantize_4bit(self.packed, self.state)
        return weight_ND

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and input.requires_grad):
            return linear(input, self.weight.to(input.dtype), self.bias)
        # some models change the output in place, which autograd refuses for a view that is made inside
        flat: Tensor = _Product.apply(input.reshape(-1, self.in_features), self)
        return flat.view(*input.shape[:-1], -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)
        self.state.to(self.packed.device)  # never to another dtype
        return self


class _Product(torch.autograd.Function):
    """Dequantizes again for the backward pass, so that no dequantized weight stays in memory between the two."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x_MD, layer.weight.to(x_MD.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, None]:
        return linear(grad_MN, ctx.layer.weight.to(grad_MN.dtype).t()), None


def nf4(model: PreTrainedModel, skip: Sequence[str]) -> BitsAndBytesConfig:
    """Return what transformers needs to load such a model in NF4; output layer, embeddings and `skip` stay as they are.

    `skip` are names of linear layers, or beginnings or ends of their names.
    """
    _bitsandbytes()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=[*get_keys_to_not_convert(model), *skip],
    )


def quantize(model: PreTrainedModel, skip: Sequence[str], device: torch.device | str) -> None:
    """Bring the linear layers of a model to `device` in NF4, one after the other."""
    functional = _bitsandbytes().functional
    for name, layer in convertible(model, skip).items():
        weight_ND = layer.weight.detach().to(device)
        packed, state = functional.quantize_4bit(weight_ND, compress_statistics=True, quant_type="nf4")
        model.set_submodule(name, QuantizedLinear(packed, state, layer.bias, layer.weight.dtype))
    if not quantized_layers(model):
        raise ModelError(f"{type(model).__name__} has no linear layer for 4 bits. Remove model.quantize.")


def dequantize(model: nn.Module) -> None:
    """Replace the layers in 4 bits by ordinary ones that compute the same."""
    for name, layer in quantized_layers(model).items():
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        linear.weight, linear.bias = nn.Parameter(layer.weight), layer.bias
        model.set_submodule(name, linear)


def convertible(model: PreTrainedModel, skip: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers by name that NF4 is for: all but output layer, embeddings, `skip` and those in 4 bits."""
    names = [*get_keys_to_not_convert(model), *skip]
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and not isinstance(layer, QuantizedLinear)
        and should_convert_module(name, names)
    }


def take_quantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the 4-bit layers that transformers has loaded; raise ModelError for one that is not a linear layer's."""
    if "is_quantized" not in vars(model):  # False once transformers has dequantized it
        return
    for name, layer in list(model.named_modules()):
        if type(layer).__name__ != "Linear4bit":
            continue
        if layer.source_cls.__name__ == "Conv1D":
            raise ModelError(
                f"{name} of {type(model).__name__} is a Conv1D, which is not trained in 4 bits. Remove model.quantize."
            )
        layer.state_dict()  # undoes the order of weights that inference on a CPU leaves
        weight = layer.weight
        model.set_submodule(name, QuantizedLinear(weight.data, weight.quant_state, layer.bias, dtype))
    if getattr(vars(model).get("hf_quantizer"), "pre_quantized", True):
        vars(model).pop("_weight_conversions", None)  # which would quantize what is written
    for trace in TRACES:
        vars(model).pop(trace, None)
    for trace in ("_is_quantized", "quantization_config"):
        vars(model.config).pop(trace, None)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers in 4 bits by the names that they have without an adapter."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear))
    return {name.replace(".base_layer", ""): layer for name, layer in layers}


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and weight of each layer in 4 bits, dequantized one at a time."""
    return ((f"{name}.weight", layer.weight) for name, layer in quantized_layers(model).items())


def adamw8bit(groups: Any, *, paged: bool, **options: Any) -> Any:
    """Return the AdamW of bitsandbytes (Dettmers et al. 2022); moments that are `paged` leave a GPU that is full."""
    return _bitsandbytes().optim.AdamW8bit(groups, is_paged=paged, **options)


def _bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends a kernel that is not used here
    return needed("bitsandbytes", "model.quantize or training.optimizer of 8 bits", "bitsandbytes")
