"""Clip-Cov and KL-Cov restrain the few tokens that make entropy collapse (Cui et al. 2025, sections 4.2 and 4.3).

A token's covariance is (log-prob - mean) (advantage - mean) over the tokens of the step. The papers' code takes it from
each micro-batch. Here it is computed once per rollout over the whole step, so it does not depend on the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.algorithms.sequences import policy_tokens
from rl4llm.core.base_algorithm import Needs, Total
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Share
from rl4llm.core.types import TrainBatch

ROUNDS = 60  # of bisection; each halves the interval that holds the threshold


@dataclass(slots=True)
class ClipCov(GRPO):
    """Cut the gradient of a small random share of the tokens with a high covariance.

    Options:
        clip_share: the share of all tokens of a step.
        cov_low, cov_high: only tokens with a covariance between them are chosen.
    """

    clip_share: Share = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    aggregation: str = "token"

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), every_token=True)  # the means are over all tokens

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        GRPO.assign(self, batches, total)
        covariances = token_covariances(batches, total)
        lots = [
            _lots(batch).masked_fill((cov_BT <= self.cov_low) | (cov_BT >= self.cov_high), -1.0)
            for batch, cov_BT in zip(batches, covariances, strict=True)
        ]
        mark_highest(batches, lots, self.clip_share, total, above=0.0)

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        loss_BT, metrics = GRPO.surrogate(self, batch, logprobs_BT)
        return loss_BT.masked_fill(batch.marked_BT, 0.0), metrics | {
            "held_back": batch.marked_BT.to(loss_BT.dtype)
        }

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if not self.cov_low < self.cov_high:
            raise ConfigError(
                f"algorithm.cov_low={self.cov_low} must be below algorithm.cov_high={self.cov_high}."
            )


@dataclass(slots=True)
class KLCov(PolicyGradient):
    """Penalize the tokens with the highest covariance for each move away from the sampling policy; nothing is clipped.

    Options:
        kl_share: the share of all tokens of a step.
        cov_coef: coefficient of the penalty |log ratio| of such a token.
    """

    kl_share: Share = 2e-4
    cov_coef: float = 1.0
    aggregation: str = "token"

    def needs(self) -> Needs:
        return replace(PolicyGradient.needs(self), every_token=True)

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        PolicyGradient.assign(self, batches, total)
        mark_highest(batches, token_covariances(batches, total), self.kl_share, total)

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        log_BT = logprobs_BT - batch.old_logprobs_BT
        loss_BT = -batch.advantages_BT * log_BT.exp() + self.cov_coef * log_BT.abs() * batch.marked_BT
        return loss_BT, {"held_back": batch.marked_BT.to(loss_BT.dtype)}


def token_covariances(batches: Sequence[TrainBatch], total: Total) -> list[Tensor]:
    """Return (log-prob - mean) (advantage - mean) of each token (B, T), float64, with means over the whole step."""
    logprobs_N = policy_tokens(batches, [batch.old_logprobs_BT for batch in batches])
    advantages_N = policy_tokens(batches, [batch.advantages_BT for batch in batches])
    count = logprobs_N.new_tensor(len(logprobs_N))
    count, *sums = total(torch.stack([count, logprobs_N.sum(), advantages_N.sum()]))
    logprob, advantage = (summed / count.clamp(min=1) for summed in sums)
    return [
        (batch.old_logprobs_BT.double() - logprob) * (batch.advantages_BT.double() - advantage)
        for batch in batches
    ]


def mark_highest(
    batches: Sequence[TrainBatch],
    scores: Sequence[Tensor],
    share: float,
    total: Total,
    above: float = -math.inf,
) -> None:
    """Set `marked_BT` at a `share` of the step's tokens, at least one: those with the highest scores above a bound.

    The threshold is found by counting, so ranks exchange only numbers. If equal scores would exceed the share, none of
    them is marked.
    """
    flat_N = policy_tokens(batches, scores)
    wanted = (total(flat_N.new_tensor(len(flat_N))) * share).floor().clamp(min=1)
    # No score exceeds the sum of all ranks' largest magnitudes.
    high = total(flat_N.abs().max() if len(flat_N) else flat_N.new_zeros(()))
    low = -high - 1
    for _ in range(ROUNDS):  # more than `wanted` scores lie above `low`, at most `wanted` above `high`
        middle = (low + high) / 2
        enough = total((flat_N > middle).sum()) <= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    for batch, score_BT in zip(batches, scores, strict=True):
        batch.marked_BT = batch.mask_BT & (score_BT > high) & (score_BT > above)


def _lots(batch: TrainBatch) -> Tensor:
    """Return a number from 0 to 1 for each token (B, T) that looks random but depends on the token alone.

    A generator's draws would depend on the order of the tokens, and so on packing. So would the last digit of recomputed
    log-probs.
    """
    own_BT = (
        batch.token_ids_BT * 12.9898
        + batch.position_ids_BT * 78.233
        + batch.sampled_logprobs_BT.double() * 1e4
    )
    return (torch.sin(own_BT) * 43758.5453).frac().abs()
