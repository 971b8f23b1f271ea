"""Supervised fine-tuning: maximum likelihood of tokens in a dataset of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl4llm.core.base_algorithm import BaseAlgorithm, LearnsFrom, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.types import TrainBatch

LEARNS_FROM: dict[str, LearnsFrom] = {
    "assistant": "demonstrations",
    "context": "worlds",
    "all": "conversations",
}


@dataclass(slots=True)
class SFT(BaseAlgorithm):
    """Minimize the negative log-likelihood of the learned tokens; all other tokens have no loss.

    Options:
        learn: whose tokens are learned. "assistant": the assistant's (imitation). "context": the environment's after the
            first answer, tools' and users' messages with the template's tokens around them, so that the model predicts
            the next state from history and action (a world model). "all": both.
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
