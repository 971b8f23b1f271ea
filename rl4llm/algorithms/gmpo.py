"""GMPO: Geometric-Mean Policy Optimization, which averages the ratios of tokens (Zhao et al. 2025, equation 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.algorithms.sequences import sequence_mean
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class GMPO(PolicyGradient):
    """Clip token ratios one by one and take their geometric mean, which a single extreme ratio moves little.

    Options:
        clip_low, clip_high: bounds of the logarithm of a token's ratio, -clip_low to clip_high.
    """

    clip_low: Positive = 0.4
    clip_high: Positive = 0.4
    aggregation: str = "sequence"

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        log_BT = logprobs_BT - batch.old_logprobs_BT
        inside_BT = log_BT.clamp(-self.clip_low, self.clip_high)
        pessimistic_BT = log_BT.minimum(inside_BT).where(batch.advantages_BT > 0, log_BT.maximum(inside_BT))
        loss_BT = -batch.advantages_BT * sequence_mean(pessimistic_BT, batch).exp()
        return loss_BT, {"clip_fraction": (pessimistic_BT != log_BT).to(log_BT.dtype)}
