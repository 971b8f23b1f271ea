"""GRPO: Group Relative Policy Optimization, which needs no critic (Shao et al. 2024, "DeepSeekMath", equation 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from rl4llm.algorithms.functional import clipped_share, clipped_surrogate, dual_clip
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive, Range
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class GRPO(PolicyGradient):
    """Compare each trajectory with the others of its prompt; PPO's clip keeps the step small.

    The standard deviation is that of a sample (ddof 1), as in verl, TRL and OpenRLHF; AReaL divides by ddof 0. A group of
    one gets advantage 0; verl and SkyRL pass on its raw reward. The paper averages within each trajectory first
    (aggregation "sequence"); verl's default is "token".

    Options:
        clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
        dual_clip: bound of the loss for negative advantages, -dual_clip A (Ye et al. 2020); null disables it, verl uses 3.
    """

    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Range(1, without=1)] | None = None
    aggregation: str = "sequence"

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        loss_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            loss_BT = dual_clip(loss_BT, batch.advantages_BT, self.dual_clip)
        return loss_BT, {
            "clip_fraction": clipped_share(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        }
