"""Supervised fine-tuning: maximum likelihood of tokens in a dataset of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import BaseAlgorithm, LearnsFrom, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.types import TrainBatch

LEARNS_FROM: dict[str, LearnsFrom] = {"assistant": "demonstrations", "context": "worlds", "all": "conversations"}


@register_algorithm("sft")
@dataclass(slots=True)
class SFT(BaseAlgorithm):
    """The negative log-likelihood of each token that is learned; all others carry no loss.

    Options:
        learn: whose tokens. "assistant": imitation of the assistant's. "context": those of the environment after the first
            answer, tools' and users' messages with the template's tokens around them, so that the model predicts the next
            state from history and action: a world model. "all": both.
        aggregation: "token" is the mean over all learned tokens, "sequence" the mean over conversations first.
    """

    learn: Literal["assistant", "context", "all"] = "assistant"
    aggregation: str = "token"

    def needs(self) -> Needs:
        return Needs(learns_from=LEARNS_FROM[self.learn])

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        return -logprobs_BT, {"nll": -logprobs_BT}

    def check(self, group_size: int) -> None:
        if self.learn not in LEARNS_FROM:
            raise ConfigError(unknown("algorithm.learn", str(self.learn), LEARNS_FROM))
