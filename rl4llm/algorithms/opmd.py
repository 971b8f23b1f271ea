"""OPMD: Online Policy Mirror Descent (Kimi Team 2025, "Kimi k1.5", section 2.3; Pan et al. 2025, "Trinity-RFT")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.policy_gradient import Choices, PolicyGradient, ScaleRewards
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TrainBatch


@register_algorithm("opmd")
@dataclass(slots=True)
class OPMD(PolicyGradient):
    """One step of mirror descent from the policy that sampled: REINFORCE without ratios, damped by 1 + tau.

    Options:
        tau: strength of the pull towards the policy that sampled.
        baseline: "mean" of the group's rewards, or "logavgexp", tau log(mean(exp(r / tau))), the exact partition function.
    """

    tau: float = 1.0
    baseline: Literal["mean", "logavgexp"] = "mean"
    scale_rewards: ScaleRewards = "none"

    choices: ClassVar[Choices] = {**PolicyGradient.choices, "baseline": ("mean", "logavgexp")}

    def compare(self, rewards_G: Tensor) -> Tensor:
        if self.baseline == "mean":
            return PolicyGradient.compare(self, rewards_G)
        return rewards_G - self.tau * ((rewards_G / self.tau).logsumexp(0) - math.log(len(rewards_G)))

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        return -batch.advantages_BT * logprobs_BT / (1 + self.tau), {}

    def check(self, group_size: int) -> None:
        PolicyGradient.check(self, group_size)
        if not self.tau > 0:
            raise ConfigError(f"algorithm.tau={self.tau} is not accepted: above 0.")
