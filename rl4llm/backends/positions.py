"""Llama 4 scales queries by position in layers without rotary embeddings.

transformers takes the length of the cache for the position of the first token, and counts from there. That is wrong for rows
of unequal length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PositionedLayer(nn.Module):
    """A decoder layer that scales queries by `position_ids`; `scale_by_position` mixes it into the layer's class."""

    self_attn: Any

    def forward(self, *args: Any, position_ids: Tensor, **options: Any) -> Any:
        attention = self.self_attn
        steps = torch.floor((position_ids.float() + 1.0) / attention.floor_scale)
        scales = (torch.log1p(steps) * attention.attn_scale + 1.0)[..., None]
        hook = attention.q_proj.register_forward_hook(lambda _, _inputs, out: (out * scales).to(out.dtype))
        try:
            return super().forward(*args, position_ids=position_ids, **options)
        finally:
            hook.remove()


def scale_by_position(model: nn.Module) -> None:
    """Mix `PositionedLayer` into the layers of a model that need it; a second call has no effect."""
    for layer in model.modules():
        attention, kind = getattr(layer, "self_attn", nn.Identity()), type(layer)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            layer.__class__ = type(kind.__name__, (PositionedLayer, kind), {"__module__": kind.__module__})
