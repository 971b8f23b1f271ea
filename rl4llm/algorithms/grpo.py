"""GRPO: Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", equation 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rl4llm.algorithms.functional import clipped_share, clipped_surrogate, dual_clip
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TrainBatch


@register_algorithm("grpo")
@dataclass(slots=True)
class GRPO(PolicyGradient):
    """Each trajectory is compared with the others of its prompt; PPO's clip keeps the step small.

    The standard deviation is that of a sample (ddof 1), as in verl, TRL and OpenRLHF; AReaL divides by ddof 0. A group of
    one gets advantage 0, where verl and SkyRL pass on its raw reward. The paper averages within each trajectory first
    (aggregation "sequence"); verl's default is "token".

    Options:
        clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
        dual_clip: bound of the loss for negative advantages, -dual_clip A (Ye et al. 2020); null is none, verl always has 3.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "sequence"

    above_0: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        loss_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            loss_BT = dual_clip(loss_BT, batch.advantages_BT, self.dual_clip)
        return loss_BT, {"clip_fraction": clipped_share(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)}

    def check(self, group_size: int) -> None:
        PolicyGradient.check(self, group_size)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(
                f"algorithm.dual_clip={self.dual_clip} is not accepted: above 1 (usually 3), or null for none."
            )
