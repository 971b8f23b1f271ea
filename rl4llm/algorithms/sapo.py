"""SAPO: Soft Adaptive Policy Optimization replaces the clip by a smooth gate (Gao et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class SAPO(PolicyGradient):
    """Pass the ratio through 4 / tau sigmoid(tau (r - 1)), whose slope is 1 on the policy and fades with the distance.

    Aggregation is by sequence as in the paper; AReaL's is by token.

    Options:
        tau_positive, tau_negative: how fast the gate closes for positive and negative advantages.
    """

    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    aggregation: str = "sequence"

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        tau_BT = torch.full_like(ratio_BT, self.tau_negative).masked_fill(
            batch.advantages_BT > 0, self.tau_positive
        )
        gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
        return -batch.advantages_BT * gate_BT, {}
