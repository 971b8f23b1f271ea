"""CISPO: clipped importance-sampling policy optimization (MiniMax 2025, "MiniMax-M1", equation 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import NonNegative
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class CISPO(PolicyGradient):
    """Weight REINFORCE by the clipped ratio: the clip bounds a token's weight, but never zeroes its gradient.

    The paper has no lower bound (`clip_low` 1). verl, slime and SkyRL clip on both sides; TRL's cap is absolute, so its
    `epsilon_high=5` is `clip_high=4` here.

    Options:
        clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
    """

    clip_low: NonNegative = 1.0
    clip_high: NonNegative = 0.28

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp().detach()
        weight_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_BT * batch.advantages_BT * logprobs_BT, {
            "clip_fraction": (weight_BT != ratio_BT).to(ratio_BT.dtype)
        }
