"""Recurrent layers over a stream of segments: each segment starts from the state after the one that it continues.

transformers' own modules compute each block, as rows with a cache of states. A segment that several others continue is
computed once, and they get copies of its states, through which gradients flow.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.attention import Stream

CACHES = ("cache_params", "past_key_values")
"""What modules call the argument with the cache."""


class States(LinearAttentionLayer):
    """The states of a recurrent layer in some rows. They are replaced, not changed in place, since autograd needs them."""

    def __init__(self, number_of_states: int):
        super().__init__(number_of_states)
        self.record_past = True  # then transformers does not change those of convolutions in place either

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def repeated(self, count: int) -> States:
        """Return the states of a single row for `count` rows."""
        copies = copy.copy(self)
        copies.conv_states = {
            number: None
            if states is None
            else states[..., -self.conv_kernel_size[number] :].expand(count, -1, -1)
            for number, states in self.conv_states.items()
        }
        copies.recurrent_states = {
            number: None if states is None else states.expand(count, *states.shape[1:])
            for number, states in self.recurrent_states.items()
        }
        return copies


class StreamedModule(nn.Module):
    """A recurrent module of transformers that also computes streams; `stream_recurrent` mixes it into the module's class."""

    layer_idx: int
    cache_name: str
    number_of_states: int

    def forward(
        self, hidden_states: Tensor, *others: Any, stream: Stream | None = None, **options: Any
    ) -> Any:
        if stream is None:
            return super().forward(hidden_states, *others, **options)
        x = hidden_states[0] if stream.pad_M is None else hidden_states[0].index_select(0, stream.pad_M)
        ends = dict(block.path[-1] for block in stream.blocks if block.path)
        after: dict[int, States] = {}
        outs, first = [], 0
        for block, part in zip(
            stream.blocks, x.split([item.count * item.length for item in stream.blocks]), strict=True
        ):
            rows = part.unflatten(0, (block.count, block.length))
            before = after[block.path[-1][0]] if block.path else None
            outs.append(
                self._block(rows, before, range(first, first + block.count), ends, after).flatten(0, 1)
            )
            first += block.count
        out = torch.cat(outs)
        return (out if stream.unpad_N is None else out.index_select(0, stream.unpad_N))[None]

    def _block(
        self,
        rows: Tensor,
        before: States | None,
        numbers: range,
        ends: dict[int, int],
        after: dict[int, States],
    ) -> Tensor:
        """Compute the segments of these numbers; keep the states at the `ends` of those that others continue."""

        def states(count: int) -> States:
            return States(self.number_of_states) if before is None else before.repeated(count)

        if ends.keys().isdisjoint(numbers):
            return self._rows(rows, states(len(rows)))
        outs = []
        for number, row in zip(numbers, rows.split(1), strict=True):
            length, after[number] = ends.get(number, rows.shape[1]), states(1)
            outs.append(F.pad(self._rows(row[:, :length], after[number]), (0, 0, 0, rows.shape[1] - length)))
        return torch.cat(outs)

    def _rows(self, rows: Tensor, states: States) -> Tensor:
        cache = Cache(layers=[states] * (self.layer_idx + 1))
        out: Tensor = super().forward(rows, **{self.cache_name: cache})
        return out


def stream_recurrent(model: PreTrainedModel) -> None:
    """Let the recurrent modules of a model compute streams; a second call has no effect."""
    cached = DynamicCache(config=model.config).layers
    for module in model.modules():
        number, kind = getattr(module, "layer_idx", None), type(module)
        caches = [name for name in CACHES if name in inspect.signature(kind.forward).parameters]
        if (
            not isinstance(number, int)
            or not caches
            or isinstance(module, StreamedModule | GradientCheckpointingLayer)
        ):
            continue
        if type(layer := cached[number]) is LinearAttentionLayer:
            namespace = {
                "cache_name": caches[0],
                "number_of_states": layer.number_of_states,
                "__module__": kind.__module__,
            }
            module.__class__ = type(kind.__name__, (StreamedModule, kind), namespace)


def unstream_recurrent(model: PreTrainedModel) -> None:
    """Undo `stream_recurrent`."""
    for module in model.modules():
        if isinstance(module, StreamedModule):
            module.__class__ = type(module).__bases__[1]
