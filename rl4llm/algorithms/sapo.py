"""SAPO: Soft Adaptive Policy Optimization (Gao et al. 2025): a smooth gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TrainBatch


@register_algorithm("sapo")
@dataclass(slots=True)
class SAPO(PolicyGradient):
    """The ratio goes through 4 / tau sigmoid(tau (r - 1)), whose slope is 1 on the policy and fades with the distance.

    Aggregation is by sequence as in the paper; AReaL's is by token.

    Options:
        tau_positive, tau_negative: how fast the gate closes for positive and negative advantages.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: str = "sequence"

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        tau_BT = torch.full_like(ratio_BT, self.tau_negative).masked_fill(batch.advantages_BT > 0, self.tau_positive)
        gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
        return -batch.advantages_BT * gate_BT, {}

    def check(self, group_size: int) -> None:
        PolicyGradient.check(self, group_size)
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ConfigError("algorithm.tau_positive and algorithm.tau_negative must be above 0.")
