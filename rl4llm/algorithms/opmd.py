"""OPMD: Online Policy Mirror Descent, as used by Kimi k1.5 (Kimi Team 2025, section 2.3; Pan et al. 2025, "Trinity-RFT")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient, ScaleRewards
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class OPMD(PolicyGradient):
    """Take one step of mirror descent from the sampling policy: REINFORCE without ratios, damped by 1 + tau.

    Options:
        tau: strength of the pull towards the sampling policy.
        baseline: "mean" of the group's rewards, or "logavgexp", tau log(mean(exp(r / tau))), the exact partition function.
    """

    tau: Positive = 1.0
    baseline: Literal["mean", "logavgexp"] = "mean"
    scale_rewards: ScaleRewards = "none"

    def compare(self, rewards_G: Tensor) -> Tensor:
        if self.baseline == "mean":
            return PolicyGradient.compare(self, rewards_G)
        return rewards_G - self.tau * ((rewards_G / self.tau).logsumexp(0) - math.log(len(rewards_G)))

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        return -batch.advantages_BT * logprobs_BT / (1 + self.tau), {}
