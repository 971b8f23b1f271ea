"""The general path: the model's own forward over our cache, for any architecture that takes a transformers cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rl4llm.core.errors import EngineError
from rl4llm.inference.kv_cache import KVCache


class SlotLayer(CacheLayerMixin):
    """One layer of a `KVCache` in the form that attention modules of transformers expect."""

    is_sliding = False

    def __init__(self, cache: KVCache, layer: int):
        super().__init__()
        self._cache, self._layer = cache, layer
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update(self._layer, key_states, value_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Slabs are made by the cache itself."""

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._cache.window.span, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._cache.window.span - self._cache.window.count

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name that releases before 5 have for `get_max_length`."""
        return -1


class ModelDecoder:
    """Computes logits with the model's own forward; every mask and position is spelled out."""

    name = "model"
    reads_prefixes = False

    def __init__(self, model: Any):
        self._model = model
        self.num_layers = model.config.get_text_config().num_hidden_layers
        accepted = inspect.signature(model.forward).parameters
        self._takes_keep = "logits_to_keep" in accepted
        missing = [name for name in ("past_key_values", "position_ids", "attention_mask") if name not in accepted]
        if missing and not any(item.kind is item.VAR_KEYWORD for item in accepted.values()):
            raise EngineError(f"{type(model).__name__}.forward takes no {', '.join(missing)}, which a cache needs.")

    def serves(self, model: Any) -> bool:
        """Whether this decoder still computes the model; its own forward always does."""
        return model is self._model

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        """Fill the cache's window with the keys and values of these tokens."""
        self._forward(token_ids_BS, cache, keep=1)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, V) after one more token per row."""
        return self._forward(token_ids_B[:, None], cache, keep=1)[:, -1]

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, S, V) after each of these tokens."""
        return self._forward(token_ids_BS, cache, keep=0)

    def _forward(self, token_ids_BS: Tensor, cache: KVCache, keep: int) -> Tensor:
        options = {"logits_to_keep": keep} if self._takes_keep else {}
        with evaluating(self._model):
            output = self._model(
                input_ids=token_ids_BS,
                attention_mask=cache.window.causal_mask(cache.dtype),
                position_ids=cache.window.positions_BS,
                past_key_values=Cache(layers=[SlotLayer(cache, layer) for layer in range(self.num_layers)]),
                use_cache=True,
                **options,
            )
        return output.logits


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, as the trainer may have left it in training mode (dropout, checkpointing)."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
