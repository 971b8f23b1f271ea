"""The fast path: the Llama family's forward as plain functions on the model's own parameters.

Llama, Qwen2, Qwen3 and Mistral are one architecture with three options: biases, norms on query and key heads, and a
tied head. Nothing is copied: the parameters that the optimizer updates in place are the ones that are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.core.errors import EngineError
from rl4llm.core.kernels import FastLinear, linear
from rl4llm.inference.kv_cache import KVCache, SharedPrefix, Window

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CHANGING_ROPE = ("dynamic", "longrope")
ROPE_AHEAD = 256
Shared = tuple[SharedPrefix, Tensor, Tensor]
"""How rows read a prompt that is cached once, and its keys and values."""


class UnsupportedModelError(EngineError):
    """The fast path cannot stand in for this model's own forward."""


class Projection(NamedTuple):
    """One linear map."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(NamedTuple):
    """Root-mean-square normalisation over the last dimension."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Layer(NamedTuple):
    """The parameters of one decoder layer."""

    attention_norm: Norm
    query: Projection
    key: Projection
    value: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    output: Projection
    mlp_norm: Norm
    gate: Projection
    up: Projection
    down: Projection


class LlamaDecoder:
    """Computes hidden states and logits of a Llama-family model over a `KVCache`.

    Raises UnsupportedModelError, with the reason, for anything that is not exactly such a model.
    """

    name = "fast"
    reads_prefixes = True

    def __init__(self, model: Any):
        _check(model)
        config, attention = model.config, model.model.layers[0].self_attn
        self.num_layers = len(model.model.layers)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self._rotary = model.model.rotary_emb
        self._tables: tuple[Tensor, Tensor] | None = None
        self._embedding = model.model.embed_tokens.weight
        self._layers = [_layer(layer) for layer in model.model.layers]
        self._norm = _norm(model.model.norm)
        self._head = _projection(model.lm_head)

    def serves(self, model: Any) -> bool:
        """Whether this decoder still computes the model: the same plain modules with the same parameters."""
        try:
            return LlamaDecoder(model)._signature() == self._signature()
        except UnsupportedModelError:
            return False

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        """Fill the cache's window with the keys and values of these tokens."""
        self._hidden(token_ids_BS, cache, fill_only=True)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, V) after one more token per row."""
        hidden_B1D = self._hidden(token_ids_B[:, None], cache)
        return self._head(self._norm(hidden_B1D[:, 0]))

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, S, V) after each of these tokens."""
        return self._head(self._norm(self._hidden(token_ids_BS, cache)))

    def _signature(self) -> list[tuple[int, torch.dtype, torch.device]]:
        parts = [part for layer in self._layers for part in layer if part is not None] + [self._norm, self._head]
        tensors = [value for part in parts for value in part if isinstance(value, Tensor)]
        return [(id(tensor), tensor.dtype, tensor.device) for tensor in [self._embedding, *tensors]]

    def _hidden(self, token_ids_BS: Tensor, cache: KVCache, fill_only: bool = False) -> Tensor:
        attend = self._attend_one if token_ids_BS.shape[1] == 1 else self._attend_many
        cos, sin = self._rope(cache.window)
        x = F.embedding(token_ids_BS, self._embedding)
        for number, layer in enumerate(self._layers):
            normed = layer.attention_norm(x)
            key = self._heads_of(normed, layer.key, layer.key_norm)
            value = self._heads_of(normed, layer.value, None)
            keys, values = cache.update(number, _rotate(key, cos, sin).transpose(1, 2), value.transpose(1, 2))
            if fill_only and number == self.num_layers - 1:
                break
            query = _rotate(self._heads_of(normed, layer.query, layer.query_norm), cos, sin)
            x = x + layer.output(attend(query, keys, values, self._prefix(cache, number), cache.window))
            normed = layer.mlp_norm(x)
            x = x + layer.down(F.silu(layer.gate(normed)).mul_(layer.up(normed)))
        return x

    @staticmethod
    def _prefix(cache: KVCache, layer: int) -> Shared | None:
        prefix = cache.window.prefix
        if prefix is None or cache.prefixes is None:
            return None
        return prefix, *cache.prefixes.read(layer, prefix.prompts, prefix.length)

    def _heads_of(self, x: Tensor, projection: Projection, norm: Norm | None) -> Tensor:
        heads = projection(x).view(*x.shape[:2], -1, self.head_dim)
        return heads if norm is None else norm(heads)

    def _attend_one(
        self, query: Tensor, keys: Tensor, values: Tensor, shared: Shared | None, window: Window
    ) -> Tensor:
        """One query position per row: the query heads that share a key head stand together as its queries.

        Two batched products are several times faster than the fused kernels at this shape on a CPU; and a prefix's keys
        and values are read once for all rows that share it.
        """
        query = query.view(window.rows, self.kv_heads, -1, self.head_dim) * self.scaling
        scores = _scores(query, keys)
        if shared is not None:
            prefix, prefix_keys, prefix_values = shared
            scores = torch.cat([prefix.spread(_scores(prefix.gather(query), prefix_keys)), scores], dim=-1)
        if window.mask is not None:
            scores = scores + window.mask
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        mixed = torch.matmul(weights[..., -window.span :], values)
        if shared is not None:
            on_prefix = prefix.gather(weights[..., : prefix.length])
            mixed = mixed + prefix.spread(torch.matmul(on_prefix, prefix_values))
        return mixed.view(window.rows, 1, -1)

    def _attend_many(
        self, query: Tensor, keys: Tensor, values: Tensor, shared: Shared | None, window: Window
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

    def _rope(self, window: Window) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the window's positions, (B, S, 1, head_dim), from the model's own module."""
        if self._tables is None or len(self._tables[0]) < window.last:
            positions = torch.arange(window.last + ROPE_AHEAD, device=self._embedding.device)
            cos, sin = self._rotary(self._embedding[:1], positions[None])
            sin = torch.cat([-sin[0, :, : self.head_dim // 2], sin[0, :, self.head_dim // 2 :]], dim=-1)
            self._tables = cos[0], sin
        cos, sin = (F.embedding(window.positions_BS, table).unsqueeze(2) for table in self._tables)
        return cos, sin


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """query (B, heads, G, D) times keys (B, heads, T, D): (B, heads, G, T)."""
    if query.device.type == "cpu" and query.dtype != torch.float32:  # oneDNN would copy a transposed slice of the cache
        return torch.matmul(keys, query.transpose(-1, -2)).transpose(-1, -2)
    return torch.matmul(query, keys.transpose(-1, -2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = (
        _norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return Layer(
        _norm(layer.input_layernorm),
        _projection(attention.q_proj),
        _projection(attention.k_proj),
        _projection(attention.v_proj),
        query_norm,
        key_norm,
        _projection(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _projection(mlp.gate_proj),
        _projection(mlp.up_proj),
        _projection(mlp.down_proj),
    )


def _projection(module: Any) -> Projection:
    if type(module) not in (nn.Linear, FastLinear):
        raise UnsupportedModelError(f"a projection is a {type(module).__name__}, not a plain nn.Linear")
    return Projection(module.weight, module.bias)


def _norm(module: Any) -> Norm:
    if not type(module).__name__.endswith("RMSNorm"):
        raise UnsupportedModelError(f"a norm is a {type(module).__name__}, not an RMSNorm")
    return Norm(module.weight, module.variance_epsilon)


def _check(model: Any) -> None:
    """Raise UnsupportedModelError for the first reason why the functions above would not compute this model."""
    kind = type(model)
    if kind.__name__ not in FAMILY or not kind.__module__.startswith("transformers.models."):
        raise UnsupportedModelError(f"{kind.__name__} is not one of {', '.join(FAMILY)}")
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    reasons: dict[str, Callable[[], bool]] = {
        f"activation {model.config.hidden_act!r} is not 'silu'": lambda: model.config.hidden_act != "silu",
        f"rope type {rope!r} changes with the length": lambda: rope in CHANGING_ROPE,
        "the embedding is not a plain nn.Embedding": lambda: type(model.model.embed_tokens) is not nn.Embedding,
        "modules have forward hooks, which only the model's own forward runs": lambda: _is_hooked(model),
        "its parameters lie on several devices": lambda: len({param.device for param in model.parameters()}) > 1,
    }
    for reason, holds in reasons.items():
        if holds():
            raise UnsupportedModelError(reason)


def _is_hooked(model: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
