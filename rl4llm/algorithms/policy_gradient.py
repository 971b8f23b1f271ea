"""What all policy-gradient methods share: how rewards become credits, and what stands beside the surrogate loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.algorithms.correction import CORRECTIONS, correction_weights
from rl4llm.algorithms.functional import KL_ESTIMATORS, group_advantages, kl_loss
from rl4llm.algorithms.registry import ALGORITHMS
from rl4llm.algorithms.returns import turn_returns, whiten
from rl4llm.core.base_algorithm import BaseAlgorithm, KLEstimator, Needs, Total
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.types import Group, TrainBatch, Trajectory

ScaleRewards = Literal["group", "batch", "none"]
Choices = Mapping[str, tuple[str, ...]]
"""Option -> what it may be."""

TRUNCATED = ("length", "context")
WITHOUT_GROUPS: Choices = {"scale_rewards": ("none", "batch")}
"""Choices of methods that do not divide by a group's deviation."""


@dataclass(slots=True)
class PolicyGradient(BaseAlgorithm):
    """Subclasses give the `surrogate`, the loss whose gradient is the policy gradient, and may compare rewards otherwise.

    Options of every method:
        scale_rewards: centred rewards are divided by the standard deviation of their "group", of the "batch", or "none".
        turn_discount: each turn is credited with what was still to be earned, discounted by this per turn, and compared with
            the same turn of the other trajectories; null credits the whole trajectory with its reward.
        whiten: advantages of all tokens of a step get mean 0 and standard deviation 1.
        drop_equal: groups whose rewards are all equal do not train, nor count in any mean.
        drop_equal_by: name of the reward that has to differ; null is the combined one.
        mask_truncated: trajectories that ran into a token limit do not train, but are compared with.
        kl_coef: strength of the KL penalty to the reference; 0 needs no reference model.
        kl_estimator: "k1", "k2", "k3" or "k3+", see `rl4llm.algorithms.functional.kl_loss`.
        kl_in: "loss" adds the penalty to each token's loss, "reward" takes it off the reward.
        kl_weighted: a penalty in the loss is multiplied by the ratio to the policy that sampled, which makes it and its
            gradient unbiased off the policy (DeepSeek-V3.2).
        kl_target, kl_horizon: with a target the coefficient follows the measured KL: each optimizer step multiplies it by
            1 + error / horizon, the relative error held within 0.2 (Ziegler et al. 2019, section 2.2).
        reference_every: steps after which the policy becomes the reference; 0 is never.
        entropy_coef: bonus for the entropy of the next-token distribution; computed only when it is not 0.
        old_logprobs: of the ratio: "sampled" by the engine, or "recomputed" by the trainer before the first update.
        correction, correction_low, correction_high: weights for engines that disagree with the trainer, see
            `rl4llm.algorithms.correction`; they need recomputed old log-probs (this is decoupled PPO, Hilton et al. 2022).
        aggregation: "token", "sequence", "prompt" or "constant", see `rl4llm.data.pack`.
    """

    scale_rewards: ScaleRewards = "group"
    turn_discount: float | None = None
    whiten: bool = False
    drop_equal: bool = False
    drop_equal_by: str | None = None
    mask_truncated: bool = False
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    kl_target: float | None = None
    kl_horizon: int = 100
    reference_every: int = 0
    entropy_coef: float = 0.0
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    correction: str | None = None
    correction_low: float = 0.5
    correction_high: float = 2.0
    aggregation: str = "token"
    _kl_factor: float = field(default=1.0, init=False, repr=False)

    compares: ClassVar[bool] = True  # the trajectories of a group with one another
    credits_turns: ClassVar[bool] = True  # when `turn_discount` asks for it
    choices: ClassVar[Choices] = {
        "scale_rewards": ("group", "batch", "none"),
        "kl_estimator": KL_ESTIMATORS,
        "kl_in": ("loss", "reward"),
        "old_logprobs": ("sampled", "recomputed"),
    }
    at_least_0: ClassVar[tuple[str, ...]] = ("kl_coef", "reference_every", "correction_low")
    above_0: ClassVar[tuple[str, ...]] = ()  # a clip of no width: what trains on the policy would be up to rounding

    def needs(self) -> Needs:
        kl_in_loss = self.kl_coef > 0 and self.kl_in == "loss"
        return Needs(
            group=self.compares,
            every_token=kl_in_loss or self.entropy_coef != 0 or self.whiten,
            entropy=self.entropy_coef != 0,
            reference=self.kl_coef > 0,
            reference_every=self.reference_every,
            reward_kl=(self.kl_coef * self._kl_factor, self.kl_estimator) if self.kl_coef > 0 and not kl_in_loss else None,
            old_logprobs=self.old_logprobs == "recomputed",
            newest=self.old_logprobs == "recomputed" and self.correction is None,
            rewards=(self.drop_equal_by,) if self.drop_equal_by is not None else (),
        )

    def keep(self, group: Group) -> bool:
        if not self.drop_equal:
            return True
        by = self.drop_equal_by
        rewards = {one.reward if by is None else one.rewards[by] for one in group.trajectories}
        return len(rewards) > 1

    def learns_from(self, trajectory: Trajectory) -> bool:
        return not (self.mask_truncated and trajectory.stop_reason in TRUNCATED)

    def credits(self, group: Group) -> Tensor:
        if self.turn_discount is None:
            return self.compare(group.rewards_G)
        returns_GK = turn_returns(group, self.turn_discount)
        credits_GK = torch.full_like(returns_GK, torch.nan)
        for turn, returns_G in enumerate(returns_GK.T):
            there_G = ~returns_G.isnan()
            credits_GK[there_G, turn] = self.compare(returns_G[there_G])
        return credits_GK

    def compare(self, rewards_G: Tensor) -> Tensor:
        """How much better each of the rewards of a prompt is than the others."""
        return group_advantages(rewards_G, scale=self.scale_rewards == "group")

    def batch_credits(self, groups: Sequence[Group], total: Total) -> list[Tensor]:
        credits = [self.credits(group) for group in groups]
        if self.scale_rewards != "batch":
            return credits
        rewards_N = torch.cat([torch.zeros(0, dtype=torch.float64), *(group.rewards_G for group in groups)])
        count, summed = total(torch.stack([torch.tensor(float(len(rewards_N)), dtype=torch.float64), rewards_N.sum()]))
        variance = total((rewards_N - summed / count.clamp(min=1)).square().sum()) / (count - 1).clamp(min=1)
        return [credit / (variance.sqrt() + 1e-6) for credit in credits]

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        for batch in batches:
            batch.advantages_BT = self.advantages(batch)
        if self.whiten:
            whiten(batches, total)
        if self.correction is not None:  # every surrogate is proportional to a positive factor of the advantage
            for batch in batches:
                weights_BT = correction_weights(batch, self.correction, self.correction_low, self.correction_high)
                batch.advantages_BT = batch.advantages_BT * weights_BT

    def advantages(self, batch: TrainBatch) -> Tensor:
        """The advantage of each token (B, T)."""
        return batch.credits_BT

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        loss_BT, metrics = self.surrogate(batch, logprobs_BT)
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        metrics = {"policy_loss": loss_BT, "ratio/mean": ratio_BT, "ratio/max": ratio_BT, **metrics}
        if self.kl_coef > 0:
            metrics["kl"] = kl_loss(logprobs_BT, batch.ref_logprobs_BT, self.kl_estimator)
            if self.kl_in == "loss":
                penalty_BT = metrics["kl"] * ratio_BT if self.kl_weighted else metrics["kl"]
                loss_BT = loss_BT + self.kl_coef * self._kl_factor * penalty_BT
        if entropy_BT is not None:
            metrics["entropy"] = entropy_BT
            loss_BT = loss_BT - self.entropy_coef * entropy_BT
        return loss_BT, metrics

    @abstractmethod
    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        """The loss of each token (B, T) without penalties and bonuses, and metrics of the method."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        if self.kl_target is None or "kl" not in metrics:
            return
        error = min(max(metrics["kl"] / self.kl_target - 1, -0.2), 0.2)
        self._kl_factor *= 1 + error / self.kl_horizon

    def state(self) -> dict[str, Any]:
        return {"kl_factor": self._kl_factor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._kl_factor = float(state.get("kl_factor", 1.0))

    def check(self, group_size: int) -> None:
        name = ALGORITHMS.name_of(type(self))
        if self.compares and group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.name={name!r}: a group is compared "
                "with itself, so a group of one never learns. Use 2 or more."
            )
        for key, accepted in self.choices.items():
            if getattr(self, key) not in accepted:
                raise ConfigError(unknown(f"algorithm.{key}", str(getattr(self, key)), accepted))
        self._check_ranges()
        if self.drop_equal_by is not None and not self.drop_equal:
            raise ConfigError("algorithm.drop_equal_by has no effect without algorithm.drop_equal=true.")
        self._check_kl()
        self._check_correction()
        if self.turn_discount is not None and not (self.credits_turns and 0 <= self.turn_discount <= 1):
            why = "0 to 1, or null" if self.credits_turns else f"{name} has no use for it; leave it out"
            raise ConfigError(f"algorithm.turn_discount={self.turn_discount} is not accepted: {why}.")

    def _check_ranges(self) -> None:
        for key in self.at_least_0:
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)} is not accepted: 0 or above.")
        for key in self.above_0:
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)} is not accepted: above 0.")

    def _check_kl(self) -> None:
        for key, given in (
            ("kl_target", self.kl_target is not None),
            ("kl_weighted", self.kl_weighted),
            ("reference_every", self.reference_every > 0),
        ):
            if given and not self.needs().reference:
                raise ConfigError(f"algorithm.{key} has no effect without a reference. Set algorithm.kl_coef above 0.")
        if self.kl_target is not None and not (self.kl_target > 0 and self.kl_horizon > 0):
            raise ConfigError("algorithm.kl_target and algorithm.kl_horizon must be above 0.")
        if self.kl_weighted and self.kl_in == "reward":
            raise ConfigError("algorithm.kl_weighted is for a penalty in the loss: leave it out, or set kl_in=loss.")

    def _check_correction(self) -> None:
        if self.correction is None:
            return
        CORRECTIONS[self.correction]
        if self.old_logprobs != "recomputed":
            raise ConfigError(
                f"algorithm.correction={self.correction!r} compares the engine's log-probs with the trainer's. "
                "Set algorithm.old_logprobs=recomputed too."
            )
        if not self.correction_low < self.correction_high:
            raise ConfigError(
                f"algorithm.correction_low={self.correction_low} must be below correction_high={self.correction_high}."
            )
