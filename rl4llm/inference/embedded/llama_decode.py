"""The fast path: the Llama family's forward as plain functions on the model's own parameters.

Llama, Qwen2, Qwen3 and Mistral are one architecture with three options: biases, norms on query and key heads, and a
tied head. Nothing is copied: this reads the parameters that the optimizer updates in place.

Under autocast the weights of linear layers are copied in its dtype. Then products and the cache have this dtype, and what
stands between layers, norms and rotations have that of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.core.errors import EngineError
from rl4llm.inference.embedded.kv_cache import KVCache, SharedPrefix, Window
from rl4llm.inference.embedded.model_decode import Layers
from rl4llm.inference.embedded.precision import Projections, adapted
from rl4llm.inference.embedded.rows import Decoder
from rl4llm.runtime.cpu import FastLinear
from rl4llm.runtime.quantized import QuantizedLinear

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CHANGING_ROPE = ("dynamic", "longrope")
ROPE_AHEAD = 256
# transformers and PEFT hang these on the embedding for gradient checkpointing. They change no number.
HARMLESS_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
Shared = tuple[SharedPrefix, Tensor, Tensor]
"""How rows read the prompts that are cached once, and the keys and values of these prompts."""


class UnsupportedModelError(EngineError):
    """The fast path cannot replace this model's own forward."""


class Norm(NamedTuple):
    """Normalises by the root mean square over the last dimension."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.rms_norm(x.float(), self.weight.shape, None, self.epsilon).to(x.dtype) * self.weight


class Layer(NamedTuple):
    """The parameters of one decoder layer."""

    attention_norm: Norm
    heads: Projections  # queries, keys, values
    query_norm: Norm | None
    key_norm: Norm | None
    output: Projections
    mlp_norm: Norm
    gates: Projections  # gate, up
    down: Projections


class LlamaDecoder(Decoder):
    """Computes hidden states and logits of a Llama-family model over a `KVCache`.

    Raises UnsupportedModelError, with the reason, for anything that is not exactly such a model.
    """

    name = "fast"
    reads_prefixes = True

    def __init__(self, model: Any, context_length: int, autocast: torch.dtype | None = None):
        _check(model, context_length)
        self._context_length, self._autocast = context_length, autocast
        config, attention = model.config, model.model.layers[0].self_attn
        self.num_layers = len(model.model.layers)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self._rotary = model.model.rotary_emb
        self.tables: tuple[Tensor, Tensor] | None = None
        self.embedding = model.model.embed_tokens.weight
        self.vocab_size, self.dtype = len(self.embedding), autocast or self.embedding.dtype
        self.layers = [_layer(layer, autocast) for layer in model.model.layers]
        self.norm = _norm(model.model.norm)
        self.head = _projections([model.lm_head], autocast)

    def serves(self, model: Any) -> bool:
        try:
            decoder = LlamaDecoder(model, self._context_length, self._autocast)
        except UnsupportedModelError:
            return False
        return decoder._signature() == self._signature()

    def refresh(self) -> None:
        for part in self._parts():
            if isinstance(part, Projections):
                part.refresh()

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        self._hidden(token_ids_BS, cache, fill_only=True)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        hidden_B1D = self._hidden(token_ids_B[:, None], cache)
        return self.head(self.norm(hidden_B1D[:, 0]))[0]

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        return self.head(self.norm(self._hidden(token_ids_BS, cache)))[0]

    def _parts(self) -> list[Projections | Norm]:
        return [*(part for layer in self.layers for part in layer if part is not None), self.norm, self.head]

    def _signature(self) -> list[Any]:
        """Return what tells this decoder from one that reads other tensors, or other scalings of adapters."""
        values: list[Tensor | float | None] = [self.embedding]
        for part in self._parts():
            values += [part.weight] if isinstance(part, Norm) else part.read()
        return [(id(x), x.dtype, x.device) if isinstance(x, Tensor) else x for x in values]

    def _hidden(self, token_ids_BS: Tensor, cache: KVCache, fill_only: bool = False) -> Tensor:
        window, prefix = cache.window, cache.window.prefix
        cos, sin = (
            F.embedding(window.positions_BS, table).unsqueeze(2) for table in self.rotations(window.last)
        )
        x = F.embedding(token_ids_BS, self.embedding)
        for number, layer in enumerate(self.layers):
            query, key, value = layer.heads(layer.attention_norm(x))
            value = self._heads_of(value, None)
            key = rotated(self._heads_of(key, layer.key_norm), cos, sin).to(value.dtype)
            keys, values = cache.update(number, key.transpose(1, 2), value.transpose(1, 2))
            if fill_only and number == self.num_layers - 1:
                break
            query = rotated(self._heads_of(query, layer.query_norm), cos, sin).to(value.dtype)
            shared: Shared | None = None
            if prefix is not None and cache.prefixes is not None:
                shared = prefix, *cache.prefixes.read(number, prefix.prompts, prefix.length)
            if window.count == 1:
                mixed = self.attend_one(query, keys, values, window.mask, shared, window.parts)
            else:
                mixed = self._attend_many(query, keys, values, window, shared)
            x = x + layer.output(mixed)[0]
            gate, up = layer.gates(layer.mlp_norm(x))
            x = x + layer.down(F.silu(gate).mul_(up))[0]
        return x

    def _heads_of(self, x: Tensor, norm: Norm | None) -> Tensor:
        heads = x.view(*x.shape[:2], -1, self.head_dim)
        return heads if norm is None else norm(heads)

    def attend_one(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        shared: Shared | None = None,
        parts: Sequence[tuple[slice, int]] = ((slice(None), 0),),
    ) -> Tensor:
        """Attend from one position per row; query heads that share a key head are treated as its queries.

        In float32 two batched products are as fast on a CPU as the fused kernel, and in narrower dtypes they copy the slice
        of the cache. The keys and values of a prefix are read once for all rows that share it, and those of a row up to
        the longest of its part of the `Window`.
        """
        query = query.reshape(len(query), self.kv_heads, -1, self.head_dim)
        lead, span, fused = 0, keys.shape[2], shared is None and _copies_slices(query)
        query = query if fused else query * self.scaling
        if shared is not None:
            prefix, prefix_keys, prefix_values = shared
            lead, on_prefix = prefix.length, prefix.spread(_scores(prefix.gather(query), prefix_keys))
        mixed, weights_of_prefix = [], []
        for rows, missing in parts:
            part, end = query[rows], span - missing
            own_keys, own_values = keys[rows, :, :end], values[rows, :, :end]
            hidden = None if mask is None else mask[rows, ..., : lead + end]
            if fused:
                mixed.append(
                    F.scaled_dot_product_attention(part, own_keys, own_values, hidden, scale=self.scaling)
                )
                continue
            scores = _scores(part, own_keys)
            if shared is not None:
                scores = torch.cat([on_prefix[rows], scores], dim=-1)
            if hidden is not None:
                scores = scores + hidden
            weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            mixed.append(torch.matmul(weights[..., lead:], own_values))
            weights_of_prefix.append(weights[..., :lead])
        output = torch.cat(mixed)
        if shared is not None:
            weights = prefix.gather(torch.cat(weights_of_prefix))
            output = output + prefix.spread(torch.matmul(weights, prefix_values))
        return output.reshape(len(query), 1, -1)

    def _attend_many(
        self, query: Tensor, keys: Tensor, values: Tensor, window: Window, shared: Shared | None
    ) -> Tensor:
        if shared is not None:
            prefix, prefix_keys, prefix_values = shared
            keys = torch.cat([prefix_keys.index_select(0, prefix.slots_B), keys], dim=2)
            values = torch.cat([prefix_values.index_select(0, prefix.slots_B), values], dim=2)
        groups = self.heads // self.kv_heads
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=window.mask,
            is_causal=window.fresh,
            scale=self.scaling,
        )
        return mixed.transpose(1, 2).flatten(2)

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of at least `length` positions, (T, head_dim), from the model's own module."""
        if self.tables is None or len(self.tables[0]) < length:
            positions = torch.arange(length + ROPE_AHEAD, device=self.embedding.device)
            cos, sin = self._rotary(self.embedding[:1], positions[None])
            sin = torch.cat([-sin[0, :, : self.head_dim // 2], sin[0, :, self.head_dim // 2 :]], dim=-1)
            self.tables = cos[0], sin
        return self.tables


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Multiply query (B, heads, G, D) by keys (B, heads, T, D); return (B, heads, G, T)."""
    if _copies_slices(query):  # more slowly if transposed
        return torch.matmul(keys, query.transpose(-1, -2)).transpose(-1, -2)
    return torch.matmul(query, keys.transpose(-1, -2))


def _copies_slices(x: Tensor) -> bool:
    """Return whether a batched product in this dtype copies a slice of the cache."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension; the signs are in `sin`."""
    x = x.to(cos.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _layer(layer: Any, autocast: torch.dtype | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = (
        _norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return Layer(
        _norm(layer.input_layernorm),
        _projections([attention.q_proj, attention.k_proj, attention.v_proj], autocast),
        query_norm,
        key_norm,
        _projections([attention.o_proj], autocast),
        _norm(layer.post_attention_layernorm),
        _projections([mlp.gate_proj, mlp.up_proj], autocast),
        _projections([mlp.down_proj], autocast),
    )


def _projections(modules: Sequence[Any], autocast: torch.dtype | None) -> Projections:
    for module in modules:
        if type(adapted(module)[0]) not in (nn.Linear, FastLinear, QuantizedLinear):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UnsupportedModelError(
                f"a projection is a {kind}, not a plain nn.Linear with at most one plain adapter"
            )
    return Projections(modules, autocast)


def _norm(module: Any) -> Norm:
    if not type(module).__name__.endswith("RMSNorm"):
        raise UnsupportedModelError(f"a norm is a {type(module).__name__}, not an RMSNorm")
    return Norm(module.weight, module.variance_epsilon)


def _check(model: Any, context_length: int) -> None:
    """Raise UnsupportedModelError with the first reason why the functions above would not compute this model."""
    kind = type(model)
    if kind.__name__ not in FAMILY or not kind.__module__.startswith("transformers.models."):
        raise UnsupportedModelError(f"{kind.__name__} is not one of {', '.join(FAMILY)}")
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    window = Layers(model).shortest_window or context_length
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if getattr(hook, "__name__", "") not in HARMLESS_HOOKS
    ]
    reasons = {
        f"activation {model.config.hidden_act!r} is not 'silu'": model.config.hidden_act != "silu",
        f"rope type {rope!r} changes with the length": rope in CHANGING_ROPE,
        f"its window of {window} tokens is shorter than the context of {context_length}": window
        < context_length,
        "the embedding is not a plain nn.Embedding": type(model.model.embed_tokens) is not nn.Embedding,
        "modules have forward hooks, which only the model's own forward runs": bool(hooks),
        "its parameters are on several devices": len({param.device for param in model.parameters()}) > 1,
    }
    if any(reasons.values()):
        raise UnsupportedModelError(next(reason for reason, holds in reasons.items() if holds))
