"""GRPO: Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", equation 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl4llm.algorithms.functional import KLEstimator, clipped_share, clipped_surrogate, group_advantages, kl_loss
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.types import Group, TrainBatch


@register_algorithm("grpo")
@dataclass(slots=True)
class GRPO(BaseAlgorithm):
    """Each trajectory is compared with the others of its prompt; PPO's clip keeps the step small.

    Options:
        clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
        scale_rewards: "group" divides by the group's standard deviation, "none" only centres (Liu et al. 2025).
        kl_coef: strength of the KL penalty to the reference; 0 needs no reference model.
        kl_estimator: "k1", "k2" or "k3", see `rl4llm.algorithms.functional.kl`.
        kl_in: "loss" adds the penalty to each token's loss, "reward" takes its sum off the trajectory's reward.
        entropy_coef: bonus for the entropy of the next-token distribution; computed only when it is not 0.
        aggregation: how token losses are summed; the paper averages within each trajectory first ("sequence").
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    scale_rewards: Literal["group", "none"] = "group"
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    aggregation: str = "sequence"

    def needs(self) -> Needs:
        kl_in_loss = self.kl_coef > 0 and self.kl_in == "loss"
        return Needs(
            group=True,
            reference=self.kl_coef > 0,
            reward_kl=(self.kl_coef, self.kl_estimator) if self.kl_coef > 0 and self.kl_in == "reward" else None,
            entropy=self.entropy_coef != 0,
            every_token=kl_in_loss or self.entropy_coef != 0,
        )

    def credits(self, group: Group) -> Tensor:
        return group_advantages(group.rewards_G, scale=self.scale_rewards == "group")

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        loss_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        metrics = {
            "ratio/mean": ratio_BT,
            "ratio/max": ratio_BT,
            "clip_fraction": clipped_share(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high),
            "policy_loss": loss_BT,
        }
        if self.kl_coef > 0 and self.kl_in == "loss":
            metrics["kl"] = kl_loss(logprobs_BT, batch.ref_logprobs_BT, self.kl_estimator)
            loss_BT = loss_BT + self.kl_coef * metrics["kl"]
        if entropy_BT is not None:
            metrics["entropy"] = entropy_BT
            loss_BT = loss_BT - self.entropy_coef * entropy_BT
        return loss_BT, metrics

    def check(self, group_size: int) -> None:
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.name='{self.name}': a group is compared "
                "with itself, so a group of one never learns. Use 2 or more."
            )
        for key in ("clip_low", "clip_high", "kl_coef"):
            if getattr(self, key) < 0:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)} is not accepted: 0 or above.")
        choices = {"scale_rewards": ("group", "none"), "kl_estimator": ("k1", "k2", "k3"), "kl_in": ("loss", "reward")}
        for key, accepted in choices.items():
            if getattr(self, key) not in accepted:
                raise ConfigError(unknown(f"algorithm.{key}", getattr(self, key), accepted))
