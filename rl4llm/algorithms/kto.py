"""KTO: Kahneman-Tversky Optimization, from answers that are each labelled good or bad (Ethayarajh et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl4llm.algorithms.sequences import sequence_sum
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class KTO(BaseAlgorithm):
    """Make good answers more likely and bad ones less likely, relative to the reference; no pairs are needed.

    With r = log(policy / reference) of an answer, and z the divergence of the policy from the reference, estimated once a
    step on answers to other prompts and kept fixed, the loss is w - w sigmoid(beta (r - z)) for a good answer and
    w - w sigmoid(beta (z - r)) for a bad one (equation 8). Each token of the answer carries it, so that the mean over
    trajectories is the mean over answers. The aggregation is fixed. TRL estimates z in each micro-batch, so it depends on
    how batches are cut. Here z is estimated once a step, over all ranks. No answer is paired with its own prompt; if a step
    has a single prompt, z is 0.

    Options:
        beta: strength of the pull towards the reference.
        desirable_weight, undesirable_weight: w of good and bad answers. The paper advises to choose them so that
            (weight x count) of the two kinds are within 1 to 4/3 of each other (section 4.2).
    """

    beta: Positive = 0.1
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0

    aggregation: ClassVar[str] = "sequence"

    def needs(self) -> Needs:
        return Needs(learns_from="labels", reference=True, mismatched=True)

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        reward_BT = self.beta * sequence_sum(logprobs_BT - batch.ref_logprobs_BT, batch)
        signs_BT = batch.credits_BT.sign()
        gain_BT = signs_BT * (reward_BT - self.beta * batch.divergence)
        weights_BT = torch.full_like(gain_BT, self.undesirable_weight).masked_fill(
            signs_BT > 0, self.desirable_weight
        )
        loss_BT = weights_BT * (1 - gain_BT.sigmoid())
        return loss_BT, {
            "kto/accuracy/weighted": (gain_BT > 0).to(loss_BT.dtype),
            "kto/margin/weighted": signs_BT * reward_BT,
            "kto/kl": batch.divergence.expand_as(loss_BT),
        }
