"""The sizes of a model, read from its config: no weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rl4llm.backends.lora import adapter_size
from rl4llm.backends.models import empty_model
from rl4llm.backends.tower import empty_image_side
from rl4llm.core.model_memory import FP32, ModelShape
from rl4llm.data.vision import fixed_tokens
from rl4llm.runtime.quantized import convertible


def read_shape(path: str, *, lora_rank: int = 0, lora_targets: Sequence[str] = ()) -> ModelShape:
    """Return `shape_of` the model of a directory or hub name; raise ModelError if it does not exist."""
    return shape_of(empty_model(path), lora_rank=lora_rank, lora_targets=lora_targets)


def shape_of(
    model: Any,
    *,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    nf4_skips: Sequence[str] | None = None,
) -> ModelShape:
    """Return the sizes of a model, which may be on the meta device, and of its adapter of rank `lora_rank`.

    With `nf4_skips`, even empty, linear layers other than these are in 4 bits.
    """
    config = model.config.get_text_config()
    widest = max(map(_attention, _layers(config)), key=lambda sizes: (sizes[0] + 2 * sizes[1]) * sizes[2])
    heads, kv_heads, head_dim = widest  # by a token's queries, keys and values
    # transformers numbers the layers: model.layers.3.mlp.up_proj.weight
    inner = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(part.isdecimal() for part in name.split("."))
    )
    total, layers = sum(parameter.numel() for parameter in model.parameters()), config.num_hidden_layers
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    in_4_bits = () if nf4_skips is None else convertible(model, nf4_skips).values()
    packed = sum(module.weight.numel() for module in in_4_bits)
    return ModelShape(
        name=type(model).__name__,
        parameters=total,
        linear=linear - packed,
        packed=packed,
        root=total - inner,
        layer=inner // layers,
        layers=layers,
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=model.get_input_embeddings().num_embeddings,
        gated=any("gate" in name for name, _ in model.named_parameters()),
        adapter=adapter_size(model, lora_rank, lora_targets) if lora_rank else 0,
    )


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of the image side of a model: its `layers`, which compute patches, and what a token of an image takes.

    A token is made of `patches`. It takes bytes of `pixels`, as the run keeps them, and of `inputs`, as the layers get them;
    its `features` are numbers, and `merged` those that are kept for the gradient while its patches become one.
    """

    layers: ModelShape
    patches: int
    pixels: int
    inputs: int
    features: int
    merged: int


def read_tower(path: str) -> TowerShape:
    """Return the sizes of the image side of a model directory or hub name; raise ModelError if it has none."""
    module = empty_image_side(path)
    text, vision = module.config.get_text_config(), module.config.vision_config
    heads = vision.num_attention_heads
    side = [part for name, part in module.named_children() if name != "language_model"]
    layers = ModelShape(
        name=type(module).__name__,
        parameters=sum(parameter.numel() for part in side for parameter in part.parameters()),
        linear=0,  # autocast is off
        root=0,
        layer=0,
        layers=vision.num_hidden_layers,
        hidden=vision.hidden_size,
        mlp=vision.intermediate_size,
        heads=heads,
        kv_heads=heads,
        head_dim=vision.hidden_size // heads,
        vocabulary=0,
        gated=any("gate" in name for name, _ in module.named_parameters()),
    )
    patch, merged = _side(vision.patch_size), getattr(vision, "spatial_merge_size", None)
    patches = merged**2 if merged else (_side(vision.image_size) // patch) ** 2 // fixed_tokens(module.config)
    pixels, frames = 3 * patches * patch**2, getattr(vision, "temporal_patch_size", 1)
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    inputs, wide = pixels * frames * FP32, patches * vision.hidden_size
    # A norm, a layer and its activation keep what they put out.
    return TowerShape(layers, patches, pixels, inputs, mergers * text.hidden_size, mergers * 3 * wide)


def _side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def with_tower(shape: ModelShape, tower: TowerShape | None) -> ModelShape:
    """Return the sizes of a model together with its image side, whose weights count as those outside the layers."""
    if tower is None:
        return shape
    added = tower.layers.parameters
    return replace(shape, parameters=shape.parameters + added, root=shape.root + added)


def _layers(config: Any) -> Sequence[Any]:
    """Return the config of each layer that differs from others, as in Gemma 4, or the config of all."""
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def _attention(layer: Any) -> tuple[int, int, int]:
    """Return the heads, the heads of keys and the size of a head of a layer."""
    heads = layer.num_attention_heads
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads
