"""A model and its head as one module: a batch goes in, one number per token comes out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl4llm.backends.heads import ValueHead, asked_tokens, token_logprobs, token_values
from rl4llm.backends.runner import Runner
from rl4llm.core.ranks import Ranks
from rl4llm.core.types import TrainBatch


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
        self.runner = Runner(model, ranks)
        if value_head is not None:
            _freeze_output_layer(model)
        self.always_runs = False  # set where other ranks wait for what this one computes

    def forward(self, batch: TrainBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(B, T) each; the entropies are None unless asked for, and of a critic."""
        if len(asked_tokens(batch)[0]):
            return self._numbers(batch, temperature, entropy)
        zeros_BT = torch.zeros(batch.mask_BT.shape, device=batch.mask_BT.device)
        if self.always_runs:
            numbers_BT, _ = self._numbers(self.runner.probe.to(zeros_BT.device), 1.0, False)
            zeros_BT = zeros_BT + nothing_of(numbers_BT)  # stops even gradients that are not finite
        return zeros_BT, zeros_BT if entropy else None

    def _numbers(self, batch: TrainBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        runner, head = self.runner, self.value_head
        with self._precision(batch.mask_BT.device):
            run = runner.hidden if runner.splits or head is not None else runner.logits
            states_SD, place_BT = run(batch)
        if head is not None:
            return token_values(states_SD, place_BT, batch, head), None
        output = runner.output_layer() if runner.splits else None
        return token_logprobs(
            states_SD, place_BT, batch, output, temperature=temperature, entropy=entropy, dtype=self.autocast
        )

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)


def _freeze_output_layer(model: PreTrainedModel) -> None:
    """What takes no part in a critic's pass would never get the gradient that other ranks wait for."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    used = [] if inner is None else [id(parameter) for parameter in inner.parameters()]
    for parameter in [] if outer is None else outer.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in used)


def nothing_of(numbers: Tensor) -> Tensor:
    """0, whose gradient is 0 and goes to everything that the numbers were made of, whatever they are."""
    return numbers.masked_fill(torch.ones_like(numbers, dtype=torch.bool), 0.0).sum()
