"""KTO: Kahneman-Tversky Optimization, from answers that are each labelled good or bad (Ethayarajh et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl4llm.algorithms.registry import register_algorithm
from rl4llm.algorithms.sequences import sequence_sum
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TrainBatch


@register_algorithm("kto")
@dataclass(slots=True)
class KTO(BaseAlgorithm):
    """Good answers become likelier and bad ones less likely than the reference has them; no pairs are needed.

    With r = log(policy / reference) of an answer, and z the divergence of the policy from the reference, estimated once a
    step on answers to other prompts and held fixed, the loss is w - w sigmoid(beta (r - z)) for a good answer and
    w - w sigmoid(beta (z - r)) for a bad one (equation 8). It stands on each token of the answer, so that the mean over
    trajectories is the mean over answers; the aggregation is no option. TRL estimates z in each micro-batch, so there it
    depends on how batches are cut.

    Options:
        beta: how close the policy stays to the reference; larger is closer.
        desirable_weight, undesirable_weight: w of good and bad answers. The paper advises to choose them so that
            (weight x count) of the two kinds are within 1 to 4/3 of each other (section 4.2).
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    aggregation: ClassVar[str] = "sequence"

    def needs(self) -> Needs:
        return Needs(learns_from="labels", reference=True, mismatched=True)

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        reward_BT = self.beta * sequence_sum(logprobs_BT - batch.ref_logprobs_BT, batch)
        signs_BT = batch.credits_BT.sign()
        gain_BT = signs_BT * (reward_BT - self.beta * batch.divergence)
        weights_BT = torch.full_like(gain_BT, self.undesirable_weight).masked_fill(signs_BT > 0, self.desirable_weight)
        loss_BT = weights_BT * (1 - gain_BT.sigmoid())
        return loss_BT, {
            "kto/accuracy/weighted": (gain_BT > 0).to(loss_BT.dtype),
            "kto/margin/weighted": signs_BT * reward_BT,
            "kto/kl": batch.divergence.expand_as(loss_BT),
        }

    def check(self, group_size: int) -> None:
        for key in ("beta", "desirable_weight", "undesirable_weight"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)} is not accepted: above 0.")
