"""Runs a causal language model over a batch, in the cheapest form that gives the model's own numbers.

Which form that is, is not looked up by the model's name: a few tokens are computed both ways, and a form that disagrees
is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4llm.backends.attention import STREAM_ATTENTION, register, rows_of, stream_of
from rl4llm.backends.heads import OutputLayer
from rl4llm.core.errors import ModelError
from rl4llm.core.ranks import Ranks
from rl4llm.core.types import TrainBatch

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Accepted difference of two forms, relative to the largest number compared."""


class Runner:
    """`streams`: batches run as one row without padding (else one padded row per trajectory).

    `splits`: the output layer can be applied to chosen hidden states (else the model computes all logits itself).
    `probe`: the few tokens that were tried, on the first of the ranks that share the model, where all of it is.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks):
        self.model = model
        self.probe = _probe_batch(model)
        self.splits, self.streams = ranks.share(self._tried() if ranks.is_first else (False, False))
        if self.streams:
            register()
            self.model.set_attn_implementation(STREAM_ATTENTION)

    def hidden(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Hidden states (S, D) after the last norm, and `place_BT`, which of them is each token's."""
        return self._stream(batch) if self.streams else self._rows(batch)

    def logits(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Logits (S, V) as the model itself computes them, and `place_BT`."""
        rows = rows_of(batch)
        output = self.model(
            input_ids=rows.token_ids_RT,
            attention_mask=rows.attention_mask_RT,
            position_ids=rows.position_ids_RT,
            use_cache=False,
        )
        return output.logits.flatten(0, 1), rows.place_BT

    def output_layer(self) -> OutputLayer:
        """The weights between hidden states and logits, as they are now."""
        layer = self.model.get_output_embeddings()
        return OutputLayer(layer.weight, layer.bias, _softcap(self.model))

    def _stream(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        stream = stream_of(batch)
        output = self.model.base_model(
            input_ids=stream.token_ids_1N,
            position_ids=stream.position_ids_1N,
            attention_mask=stream.token_ids_1N.new_empty(1, 1, 0, 0),  # four dimensions: transformers makes no mask
            use_cache=False,
            stream=stream,
        )
        return output.last_hidden_state[0], stream.place_BT

    def _rows(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        rows = rows_of(batch)
        output = self.model.base_model(
            input_ids=rows.token_ids_RT,
            attention_mask=rows.attention_mask_RT,
            position_ids=rows.position_ids_RT,
            use_cache=False,
        )
        return output.last_hidden_state.flatten(0, 1), rows.place_BT

    def _tried(self) -> tuple[bool, bool]:
        """Whether the output layer splits off, and whether batches can be streams."""
        splits = self._output_layer_is_all(self.probe)
        return splits, splits and self._can_stream(self.probe)

    @torch.no_grad()
    def _output_layer_is_all(self, batch: TrainBatch) -> bool:
        layer = self.model.get_output_embeddings()
        if self.model.base_model is self.model or not isinstance(layer, torch.nn.Linear):
            return False
        hidden, _ = self._rows(batch)
        return _agree(self.output_layer()(hidden), self.logits(batch)[0])

    @torch.no_grad()
    def _can_stream(self, batch: TrainBatch) -> bool:
        if self.model.config._attn_implementation not in ("sdpa", STREAM_ATTENTION):
            return False
        expected = _computed(*self._rows(batch))
        register()
        self.model.set_attn_implementation(STREAM_ATTENTION)
        try:
            taken = self.model.config._attn_implementation == STREAM_ATTENTION
            return taken and _agree(_computed(*self._stream(batch)), expected)
        except (ModelError, TypeError, ValueError, IndexError, RuntimeError):
            return False  # the architecture wants masks or arguments of its own
        finally:
            self.model.set_attn_implementation("sdpa")


def _softcap(model: PreTrainedModel) -> float:
    return float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)


def _computed(states_SD: Tensor, place_BT: Tensor) -> Tensor:
    """The states of the tokens that are computed, in the batch's order."""
    return states_SD[place_BT[place_BT >= 0]]


def _agree(one: Tensor, other: Tensor) -> bool:
    scale = other.float().abs().max().clamp(min=1e-6)
    return bool((one.float() - other.float()).abs().max() <= TOLERANCES[other.dtype] * scale)


def _probe_batch(model: PreTrainedModel) -> TrainBatch:
    """A shared prompt with two continuations, and a trajectory of its own; their lengths differ."""
    lengths, T = (3, 2, 5, 4), 14
    segments = torch.tensor([[segment for segment, length in enumerate(lengths, 1) for _ in range(length)]])
    positions = [*range(3), *range(3, 5), *range(3, 8), *range(4)]
    previous = [-1, 0, 1, 2, 3, 2, 5, 6, 7, 8, -1, 10, 11, 12]
    vocabulary = model.config.get_text_config().vocab_size
    zeros = torch.zeros(1, T)
    return TrainBatch(
        token_ids_BT=torch.arange(1, T + 1)[None] * 7 % vocabulary,
        position_ids_BT=torch.tensor([positions]),
        segment_ids_BT=segments,
        mask_BT=torch.tensor([[position >= 3 for position in positions]]),
        sampled_logprobs_BT=zeros,
        credits_BT=zeros,
        weights_BT=zeros,
        previous_BT=torch.tensor([previous]),
    ).to(next(model.parameters()).device)
