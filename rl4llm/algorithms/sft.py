"""Supervised fine-tuning: maximum likelihood of the demonstrated assistant tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.types import TrainBatch


@register_algorithm("sft")
@dataclass(slots=True)
class SFT(BaseAlgorithm):
    """The negative log-likelihood of each assistant token; the user's, tool's and template's tokens carry no loss."""

    aggregation: str = "token"

    def needs(self) -> Needs:
        return Needs(learns_from="demonstrations")

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        return -logprobs_BT, {"nll": -logprobs_BT}
