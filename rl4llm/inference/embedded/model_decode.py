"""The general path: the model's own forward on the engine's cache, for any model that accepts a transformers cache.

transformers says what each layer caches. Layers with attention keep keys and values of all tokens, and a mask hides those
outside a window, so rows of unequal length decode together and a cache can be cut anywhere. Recurrent layers keep one state
per row, which serves only a sequence that continues all its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import chunked_overlay, sliding_window_overlay

from rl4llm.core.errors import EngineError
from rl4llm.core.images import tower_of
from rl4llm.inference.embedded.kv_cache import KVCache, StateName, Window
from rl4llm.inference.embedded.precision import AutocastCopy
from rl4llm.inference.embedded.rows import Decoder

DUMMY = "DummyLayer"  # a layer without a cache; older releases of transformers have no such class
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
STATES = ("conv_states", "recurrent_states")


class SlotLayer(CacheLayerMixin):
    """One layer of a `KVCache` in the form that attention modules of transformers expect."""

    is_sliding = False

    def __init__(self, cache: KVCache, layer: int):
        super().__init__()
        self._cache, self._layer = cache, layer
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = self._cache.dtype  # under autocast rotated keys are wider
        return self._cache.update(self._layer, key_states.to(dtype), value_states.to(dtype))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the cache allocates its slabs."""

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._cache.window.span, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._cache.window.span - self._cache.window.count

    def get_max_length(self) -> int:
        return -1


class Layers:
    """What the layers of a model cache, by transformers' own classes for its configuration.

    `windows` has the length of the window of each kind of layer, as the model names it; None for kinds without one.
    `recurrent` is whether any layer has a state. Raises EngineError for what the engine cannot cache.
    """

    def __init__(self, model: Any):
        self.cached = DynamicCache(config=model.config).layers
        declared = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
        kinds = declared or [
            SLIDING if isinstance(layer, DynamicSlidingWindowLayer) else FULL for layer in self.cached
        ]
        self.recurrent = any(type(layer) is LinearAttentionLayer for layer in self.cached)
        self.windows: dict[str, int | None] = {}
        supported = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
        unsupported = set()
        # In older releases the last layers, which read what earlier ones cached, are missing here.
        for kind, layer in zip(kinds, self.cached, strict=False):
            if type(layer) not in supported and type(layer).__name__ != DUMMY:
                unsupported.add(kind)
            size = getattr(layer, "sliding_window", self.windows.get(kind))
            if self.windows.setdefault(kind, size) != size:
                unsupported.add(f"{kind} layers with windows of {self.windows[kind]} and {size}")
        if unsupported or (getattr(model, "_is_stateful", False) and not declared):
            what = ", ".join(sorted(unsupported)) or "a recurrent state"
            raise EngineError(
                f"{type(model).__name__} uses {what}, which the embedded engine cannot cache. Use another model or engine."
            )

    @property
    def shortest_window(self) -> int | None:
        """Return the length of the shortest window; None without windows."""
        return min((size for size in self.windows.values() if size), default=None)


class ModelDecoder(Decoder):
    """Computes logits with the model's own forward, with explicit masks and positions."""

    name = "model"

    def __init__(self, model: Any, autocast: torch.dtype | None = None):
        self._copy = None if autocast is None else AutocastCopy(model, autocast)
        self._model, self._autocast = model if self._copy is None else self._copy.model, autocast
        self._layers, self._tower = Layers(model), tower_of(model)
        self.recurrent = self._layers.recurrent
        self._takes_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def serves(self, model: Any) -> bool:
        """Return whether this decoder computes the model; its own forward always does, a copy's only while it is one."""
        return model is self._model if self._copy is None else self._copy.mirrors(model)

    def refresh(self) -> None:
        if self._copy is not None:
            self._copy.refresh()

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        self._forward(token_ids_BS, cache, keep=1)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        return self._forward(token_ids_B[:, None], cache, keep=1)[:, -1]

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        return self._forward(token_ids_BS, cache, keep=0)

    def _forward(self, token_ids_BS: Tensor, cache: KVCache, keep: int) -> Tensor:
        options = {"logits_to_keep": keep} if self._takes_keep else {}
        layers = [self._layer(cache, number, like) for number, like in enumerate(self._layers.cached)]
        causal = cache.window.causal_mask(cache.dtype)
        if cache.window.features is not None:
            causal = self._tower.opened(causal, cache.window.positions_BS, *cache.window.features)
        masks = {kind: _mask(cache, causal, kind, size) for kind, size in self._layers.windows.items()}
        axes_ABS = cache.window.axes_ABS
        with evaluating(self._model), autocasting(token_ids_BS.device, self._autocast):
            output = self._model(
                **self._inputs(token_ids_BS, cache.window),
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=cache.window.positions_BS if axes_ABS is None else axes_ABS,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                **options,
            )
        for number, layer in enumerate(layers):
            if isinstance(layer, LinearAttentionLayer):
                _keep_states(cache, number, layer)
        return output.logits

    def _inputs(self, token_ids_BS: Tensor, window: Window) -> dict[str, Any]:
        if window.features is None:
            return {"input_ids": token_ids_BS}
        inputs: dict[str, Any] = self._tower.inputs(self._model, token_ids_BS, *window.features)
        return inputs

    def _layer(self, cache: KVCache, number: int, like: Any) -> Any:
        """Return what one layer finds in the cache, in the form that modules of transformers expect."""
        if isinstance(like, LinearAttentionLayer):
            return _with_states(cache, number, LinearAttentionLayer(like.number_of_states))
        return like if type(like).__name__ == DUMMY else SlotLayer(cache, number)


def _mask(cache: KVCache, causal: Tensor, kind: str, size: int | None) -> Tensor | None:
    """Return the additive mask of a kind of layers, (B, 1, S, span); None for layers without attention."""
    window = cache.window
    if kind not in (FULL, SLIDING, CHUNKED):
        return None  # windows have equal lengths, without padding
    if size is None or window.last <= size:
        return causal
    rows = torch.arange(window.rows, device=cache.device)
    overlay = (
        sliding_window_overlay(size) if kind == SLIDING else chunked_overlay(size, torch.zeros_like(rows))
    )
    keys = torch.arange(window.span, device=cache.device)
    seen = overlay(rows[:, None, None, None], 0, window.positions_BS[:, None, :, None], keys)
    return causal.masked_fill(~seen, torch.finfo(cache.dtype).min)


def _with_states(cache: KVCache, number: int, layer: LinearAttentionLayer) -> LinearAttentionLayer:
    """Give a recurrent layer the states of the window's rows, zeros where a row begins."""
    for name, states in _states(cache, number):
        _, field, index = name
        states[cache.window.opening] = 0
        getattr(layer, field)[index] = states
        getattr(layer, f"is_{field}_initialized")[index] = layer.has_previous_state[index] = True
        if field == "conv_states":
            layer.device, layer.dtype, layer.conv_kernel_size[index] = (
                states.device,
                states.dtype,
                states.shape[-1],
            )
    return layer


def _keep_states(cache: KVCache, number: int, layer: LinearAttentionLayer) -> None:
    """Store the states of a recurrent layer that it did not change in place, such as its first."""
    for field in STATES:
        for index, states in getattr(layer, field).items():
            if states is not None:
                slab = cache.states_like((number, field, index), states)
                rows = slab[cache.window.first : cache.window.first + cache.window.rows]
                if rows.data_ptr() != states.data_ptr():
                    rows.copy_(states)


def _states(cache: KVCache, number: int) -> Iterator[tuple[StateName, Tensor]]:
    rows = slice(cache.window.first, cache.window.first + cache.window.rows)
    for name, states in cache.states.items():
        if name[0] == number:
            yield name, states[rows]


def autocasting(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context with autocast to `dtype`, or without autocast."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside; the trainer may have left it in training mode (dropout, checkpointing)."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
