"""What of a model decides about memory, read from its config: no weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rl4llm.backends.models import empty_model


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model, in numbers, not bytes.

    `linear` counts the weights of linear layers, which autocast copies; `root` those outside the layers, of embeddings, head
    and last norm; `layer` those of one layer. `gated` says whether the MLP multiplies two projections, as Llama's does.
    """

    name: str
    parameters: int
    linear: int
    root: int
    layer: int
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool
    adapter: int = 0

    def trained(self) -> int:
        """Numbers that change: those of the adapter, or all."""
        return self.adapter or self.parameters


def shape_of(model: Any, *, lora_rank: int = 0, lora_targets: Sequence[str] = ()) -> ModelShape:
    """The sizes of a model, which may be on the meta device; with an adapter of rank `lora_rank` beside it."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    inner = [parameter.numel() for name, parameter in model.named_parameters() if _in_layer(name)]
    total, layers = sum(parameter.numel() for parameter in model.parameters()), config.num_hidden_layers
    linear = _linear(model).values()
    return ModelShape(
        name=type(model).__name__,
        parameters=total,
        linear=sum(module.weight.numel() for module in linear),
        root=total - sum(inner),
        layer=sum(inner) // layers,
        layers=layers,
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=model.get_input_embeddings().num_embeddings,
        gated=any("gate" in name for name, _ in model.named_parameters()),
        adapter=_adapter(model, lora_rank, lora_targets) if lora_rank else 0,
    )


def read_shape(path: str, *, lora_rank: int = 0, lora_targets: Sequence[str] = ()) -> ModelShape:
    """`shape_of` the model of a directory or hub name; raises ModelError when there is none."""
    return shape_of(empty_model(path), lora_rank=lora_rank, lora_targets=lora_targets)


def _adapter(model: Any, rank: int, targets: Sequence[str]) -> int:
    """A (rank, in) and B (out, rank) beside each linear layer but the output layer. Hu et al. 2021, section 4.1."""
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    chosen = (
        module
        for name, module in _linear(model).items()
        if module not in outer and (not targets or name.rpartition(".")[2] in targets)
    )
    return sum(rank * (module.in_features + module.out_features) for module in chosen)


def _linear(model: Any) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _in_layer(name: str) -> bool:
    """transformers numbers the layers: model.layers.3.mlp.up_proj.weight."""
    return any(part.isdecimal() for part in name.split("."))
