"""Run a causal language model and its head over a batch, in the cheapest form that gives the model's own numbers.

The model's name does not decide the form. The runner computes a few tokens both ways and drops a form that disagrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl4llm.backends.attention import STREAM_ATTENTION, STREAM_EAGER, register, rows_of, stream_of
from rl4llm.backends.heads import OutputLayer, ValueHead, asked_tokens, token_logprobs, token_values
from rl4llm.backends.recurrent import stream_recurrent, unstream_recurrent
from rl4llm.core.base_backend import Head
from rl4llm.core.errors import ModelError
from rl4llm.core.images import tower_of
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch
from rl4llm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from rl4llm.backends.varlen import Kernel

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Accepted difference of two forms, relative to the largest number compared."""


class ModelRunner:
    """`streams`: batches run as one row without padding (else one padded row per trajectory).

    `splits`: the output layer can be applied to chosen hidden states (else the model computes all logits itself).
    `padded_since`: why batches do not run as one row, "" if they do.
    `probe`: the few tokens that were tried, on the first of the ranks that share the model, where all of it is.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks):
        self.model, self._tower = model, tower_of(model)
        self.probe = _probe_batch(model)
        # Whether the output layer splits off, and whether batches can be streams.
        self.padded_since = "the model computes its logits itself"
        splits = ranks.is_first and self._output_layer_is_all()
        streamed = splits and self._can_stream()
        self.splits, self.streams, self.padded_since = ranks.share((splits, streamed, self.padded_since))
        if self.streams:
            register()
            stream_recurrent(self.model)
            self.model.set_attn_implementation(self._stream_attention)

    def hidden(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states (S, D) after the last norm, and `place_BT`, the index of each token's state."""
        return self._stream(batch) if self.streams else self._rows(batch)

    def logits(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return logits (S, V) as the model itself computes them, and `place_BT`."""
        output, place_BT = self._run_rows(self.model, batch)
        return output.logits.flatten(0, 1), place_BT

    def output_layer(self) -> OutputLayer:
        """Return the layer between hidden states and logits with its current weights."""
        layer = self.model.get_output_embeddings()
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return OutputLayer(layer.weight, layer.bias, float(softcap or 0.0))

    def _stream(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        device = batch.mask_BT.device
        casts = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if casts else self.model.dtype
        stream = stream_of(batch, self.kernel(device, dtype))
        output = self.model.base_model(
            **self._inputs(stream.token_ids_1N, stream.feature_ids_1N, batch),
            position_ids=stream.position_ids_1N if stream.axes_A1N is None else stream.axes_A1N,
            # four dimensions: transformers makes no mask
            attention_mask=stream.token_ids_1N.new_empty(1, 1, 0, 0),
            use_cache=False,
            stream=stream,
        )
        return output.last_hidden_state[0], stream.place_BT

    def kernel(self, device: torch.device, dtype: torch.dtype) -> Kernel | None:
        """Return what computes the attention of a stream in one call; None if nothing can."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        if not heads or getattr(config, "is_heterogeneous", False):
            return None  # or the sizes of layers differ
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return kernel_for(device, dtype, heads, kv_heads, width)

    def _rows(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        output, place_BT = self._run_rows(self.model.base_model, batch)
        return output.last_hidden_state.flatten(0, 1), place_BT

    def _run_rows(self, model: nn.Module, batch: TrainBatch) -> tuple[Any, Tensor]:
        """Return the output of a model on padded rows, and `place_BT`."""
        rows = rows_of(batch)
        mask = rows.attention_mask_RT
        if self._tower is not None:
            mask = self._tower.masks(self.model, mask, rows.feature_ids_RT, batch.images)
        output = model(
            **self._inputs(rows.token_ids_RT, rows.feature_ids_RT, batch),
            attention_mask=mask,
            position_ids=rows.position_ids_RT if rows.axes_ART is None else rows.axes_ART,
            use_cache=False,
        )
        return output, rows.place_BT

    def _inputs(
        self, token_ids_RT: Tensor, feature_ids_RT: Tensor | None, batch: TrainBatch
    ) -> dict[str, Any]:
        """Return the arguments for the tokens, with what the model sees of their images."""
        tower = self._tower
        if tower is None and feature_ids_RT is not None:
            raise ModelError(
                "The batch has images, but the model was loaded without them. Set model.vision=frozen."
            )
        if tower is None:
            return {"input_ids": token_ids_RT}
        inputs: dict[str, Any] = (
            tower.without_images(self.model, token_ids_RT)
            if feature_ids_RT is None
            else tower.inputs(self.model, token_ids_RT, feature_ids_RT, batch.images)
        )
        return inputs

    @torch.no_grad()
    def _output_layer_is_all(self) -> bool:
        layer = self.model.get_output_embeddings()
        if self.model.base_model is self.model or not isinstance(layer, torch.nn.Linear):
            return False
        hidden_SD, _ = self._rows(self.probe)
        return _agree(self.output_layer()(hidden_SD), self.logits(self.probe)[0])

    @property
    def _stream_attention(self) -> str:
        """Return the attention for streams that stands in for the model's own, "" if there is none."""
        attention = self.model.config._attn_implementation
        eager = {} if self.model._supports_sdpa else {"eager": STREAM_EAGER}  # else the user chose it
        return {"sdpa": STREAM_ATTENTION, **eager}.get(
            attention, attention if attention in (STREAM_ATTENTION, STREAM_EAGER) else ""
        )

    @torch.no_grad()
    def _can_stream(self) -> bool:
        attention, stream_attention = self.model.config._attn_implementation, self._stream_attention
        self.padded_since = f"its attention is {attention!r}, not 'sdpa'"
        if not stream_attention:
            return False
        if self._tower is not None and self._tower.both_ways:
            self.padded_since = "the tokens of an image attend to each other in both directions"
            return False
        expected = _computed(*self._rows(self.probe))
        register()
        self.model.set_attn_implementation(stream_attention)
        try:
            stream_recurrent(self.model)
            self.padded_since = "its layers mix the tokens of a row in a way that is not known here"
            if self.model.config._attn_implementation == stream_attention and _agree(
                _computed(*self._stream(self.probe)), expected
            ):
                self.padded_since = ""
        except torch.OutOfMemoryError:
            raise
        except (ModelError, AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
            self.padded_since = str(error)  # the architecture needs masks or other arguments
        finally:
            unstream_recurrent(self.model)
            self.model.set_attn_implementation(attention)
        return not self.padded_since


class TokenNumbers(nn.Module):
    """Log-probs of a model, or values where it has a value head.

    The runner calls the parts of a model, not the model. DDP and FSDP2 act when the module that they were given is called,
    so they are given this one. `autocast` is the dtype of the matrix products, None for that of the weights.
    """

    def __init__(
        self, model: PreTrainedModel, value_head: ValueHead | None, autocast: torch.dtype | None, ranks: Ranks
    ):
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.autocast = autocast
        self.runner = ModelRunner(model, ranks)
        if value_head is not None:
            # What takes no part in a critic's pass would never get the gradient that other ranks wait for.
            inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
            used = [] if inner is None else [id(parameter) for parameter in inner.parameters()]
            for parameter in [] if outer is None else outer.parameters():
                parameter.requires_grad_(parameter.requires_grad and id(parameter) in used)
        self.always_runs = False  # set where other ranks wait for what this one computes

    def forward(
        self, batch: TrainBatch, temperature: float, entropy: bool, head: Head | None = None
    ) -> tuple[Any, ...]:
        """Return numbers and entropies (B, T), the entropies None for a critic and unless requested; or what `head` does."""
        if len(asked_tokens(batch)[0]):
            return self._numbers(batch, temperature, entropy, head)
        zeros_BT = torch.zeros(batch.mask_BT.shape, device=batch.mask_BT.device)
        if self.always_runs:
            numbers_BT, _ = self._numbers(self.runner.probe.to(zeros_BT.device), 1.0, False)
            zeros_BT = zeros_BT + nothing_of(numbers_BT)  # stops even gradients that are not finite
        return (zeros_BT, zeros_BT if entropy else None) if head is None else head.nothing(zeros_BT, entropy)

    def _numbers(
        self, batch: TrainBatch, temperature: float, entropy: bool, head: Head | None = None
    ) -> tuple[Any, ...]:
        runner, value_head = self.runner, self.value_head
        enabled, dtype = self.autocast is not None, self.autocast or torch.bfloat16
        with torch.autocast(batch.mask_BT.device.type, dtype=dtype, enabled=enabled):
            run = runner.hidden if runner.splits or value_head is not None else runner.logits
            states_SD, place_BT = run(batch)
        if value_head is not None:
            return token_values(states_SD, place_BT, batch, value_head), None
        output = runner.output_layer() if runner.splits else None
        return (head or token_logprobs)(
            states_SD, place_BT, batch, output, temperature=temperature, entropy=entropy, dtype=self.autocast
        )


def nothing_of(numbers: Tensor) -> Tensor:
    """Return 0 with a gradient of 0 for everything that the numbers depend on, even if they are not finite."""
    return numbers.masked_fill(torch.ones_like(numbers, dtype=torch.bool), 0.0).sum()


def _computed(states_SD: Tensor, place_BT: Tensor) -> Tensor:
    """Return the states of the tokens that are computed, in the batch's order."""
    return states_SD[place_BT[place_BT >= 0]]


def _agree(one: Tensor, other: Tensor) -> bool:
    scale = other.float().abs().max().clamp(min=1e-6)
    return bool((one.float() - other.float()).abs().max() <= TOLERANCES[other.dtype] * scale)


def _probe_batch(model: PreTrainedModel) -> TrainBatch:
    """Return a batch of three trajectories that share a prompt, two of them more, and of a separate one.

    Where the model sees images, the prompt has one.
    """
    tower = tower_of(model)
    prompt = 3 if tower is None else len(tower.sequence[0])
    lengths, branch = (prompt + 2, prompt + 5, prompt + 6, 4), prompt + 3
    begins, T = np.cumsum(lengths) - lengths, sum(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    computed = np.arange(T)
    computed[begins[1] : begins[1] + prompt] = range(prompt)
    computed[begins[2] : begins[2] + branch] = computed[begins[1] : begins[1] + branch]
    sampled = positions >= prompt
    sampled[-1] = True
    zeros = torch.zeros(1, T)
    return TrainBatch(
        token_ids_BT=torch.from_numpy(1 + computed * 7 % (model.config.get_text_config().vocab_size - 1))[
            None
        ],
        position_ids_BT=torch.from_numpy(positions)[None],
        segment_ids_BT=torch.from_numpy(np.repeat([1, 2, 3, 4], lengths))[None],
        mask_BT=torch.from_numpy(sampled)[None],
        sampled_logprobs_BT=zeros,
        credits_BT=zeros,
        weights_BT=zeros,
        computed_BT=torch.from_numpy(computed)[None],
        **({} if tower is None else tower.among(positions, alone=4)),
    ).to(next(model.parameters()).device)


def kernel_for(device: torch.device, *sizes: Any) -> Kernel | None:
    """Return `varlen.kernel_for` of these sizes; on a CPU there is none, and it is not imported."""
    kernel: Kernel | None = (
        None if device.type == "cpu" else load("rl4llm.backends.varlen:kernel_for")(device, *sizes)
    )
    return kernel
