"""The base of all policy-gradient methods: rewards become credits, and penalties are added to the surrogate loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from rl4llm.algorithms.functional import deviation, differ, group_advantages, kl, kl_loss
from rl4llm.algorithms.returns import played_turns, turn_returns, whiten
from rl4llm.core.base_algorithm import BaseAlgorithm, KLEstimator, Needs, Total
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import load
from rl4llm.core.schema import Count, Fraction, Natural, NonNegative, Positive
from rl4llm.core.tables import ALGORITHMS, CORRECTIONS
from rl4llm.core.types import TRUNCATED, Group, TrainBatch, Trajectory

ScaleRewards = Literal["group", "batch", "none"]
ScaleBatch = Literal["none", "batch"]
"""Choices for methods that do not divide by a group's deviation."""


@dataclass(slots=True)
class PolicyGradient(BaseAlgorithm):
    """Subclasses define the `surrogate`, the loss whose gradient is the policy gradient, and may override `compare`.

    Options of every method:
        scale_rewards: centred rewards are divided by the standard deviation of their "group", of the "batch", or "none".
        turn_discount: credit each turn with its reward to go, discounted by this per turn, and compare it with the same
            turn of the other trajectories; null credits the whole trajectory with its reward.
        whiten: give the advantages of all tokens of a step mean 0 and standard deviation 1.
        filter_groups: filter zero-variance groups: groups whose rewards are all equal, up to rounding, neither train nor
            count in any mean. If turns are credited, the reward to go at each turn must be equal too.
        filter_groups_by: name of the reward that must differ, which filters groups too; null is the combined reward.
        mask_truncated: trajectories that reached a token limit do not train. The others of their group are still compared
            with them; `whiten` and a critic leave them out.
        kl_coef: strength of the KL penalty to the reference; 0 needs no reference model.
        kl_estimator: "k1", "k2", "k3" or "k3+", see `rl4llm.algorithms.functional.kl_loss`.
        kl_in: "loss" adds the penalty to each token's loss, "reward" subtracts it from the reward.
        kl_weighted: multiply a penalty in the loss by the ratio to the sampler: unbiased off-policy (DeepSeek-V3.2).
        kl_target, kl_horizon: with a target the coefficient follows the measured KL: each optimizer step multiplies it by
            1 + error / horizon, with the relative error clipped to 0.2 (Ziegler et al. 2019, section 2.2).
        reference_every: every this many steps the policy becomes the reference; 0 disables it.
        entropy_coef: coefficient of the bonus for the entropy of the next-token distribution; 0 does not compute it.
        old_logprobs: log-probs of the ratio's denominator: "sampled" by the engine, or "recomputed" by the trainer before
            the first update, as under `rollout.max_staleness` by default: a clip around older weights stops learning.
        correction, correction_low, correction_high: weights for engines that disagree with the trainer, see
            `rl4llm.algorithms.correction`, of recomputed log-probs (Hilton et al. 2022). For older samples "tis" up to 1.5.
        aggregation: "token", "sequence", "prompt" or "constant", see `rl4llm.data.pack`.
    """

    scale_rewards: ScaleRewards = "group"
    turn_discount: Fraction | None = None
    whiten: bool = False
    filter_groups: bool = False
    filter_groups_by: str | None = None
    mask_truncated: bool = False
    kl_coef: NonNegative = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    kl_target: Positive | None = None
    kl_horizon: Count = 100
    reference_every: Natural = 0
    entropy_coef: float = 0.0
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    correction: str | None = None
    correction_low: NonNegative = 0.5
    correction_high: float = 2.0
    aggregation: str = "token"
    _kl_factor: float = field(default=1.0, init=False, repr=False)

    compares: ClassVar[bool] = True  # the trajectories of a group with one another

    def needs(self) -> Needs:
        kl_in_loss = self.kl_coef > 0 and self.kl_in == "loss"
        return Needs(
            group=self.compares,
            every_token=kl_in_loss or self.entropy_coef != 0 or self.whiten,
            entropy=self.entropy_coef != 0,
            reference=self.kl_coef > 0,
            reference_every=self.reference_every,
            reward_kl=(self.kl_coef * self._kl_factor, self.kl_estimator)
            if self.kl_coef > 0 and not kl_in_loss
            else None,
            old_logprobs=self.old_logprobs == "recomputed",
            old_in_losses=all(getattr(type(self), name) is method for name, method in READERS.items()),
            rewards=(self.filter_groups_by,) if self.filter_groups_by is not None else (),
        )

    @classmethod
    def stale_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = options.get(
            "correction", next(option.default for option in fields(cls) if option.name == "correction")
        )
        if options.get("old_logprobs") == "sampled" or ("correction" in options and chosen is None):
            return {}
        weights = {} if chosen is not None else {"correction": "tis", "correction_high": 1.5}
        return {"old_logprobs": "recomputed", **weights}

    def keep(self, group: Group) -> bool:
        if self.filter_groups_by is not None:
            return differ([trajectory.rewards[self.filter_groups_by] for trajectory in group.trajectories])
        if not self.filter_groups or differ(group.rewards_G.tolist()):
            return True
        if self.credits(group).dim() == 1:
            return False
        returns_GK = turn_returns(group, 1.0 if self.turn_discount is None else self.turn_discount)
        turns = zip(returns_GK.T, played_turns(group).T, strict=True)
        return any(differ(returns_G[there_G].tolist()) for returns_G, there_G in turns)

    def learns_from(self, trajectory: Trajectory) -> bool:
        return not (self.mask_truncated and trajectory.stop_reason in TRUNCATED)

    def credits(self, group: Group) -> Tensor:
        if self.turn_discount is None:
            return self.compare(group.rewards_G)
        returns_GK = turn_returns(group, self.turn_discount)
        credits_GK = torch.zeros_like(returns_GK)
        for turn, there_G in enumerate(played_turns(group).T):
            credits_GK[there_G, turn] = self.compare(returns_GK[there_G, turn])
        return credits_GK

    def compare(self, rewards_G: Tensor) -> Tensor:
        """Return how much better each reward of a prompt is than the others (G,)."""
        return group_advantages(rewards_G, scale=self.scale_rewards == "group")

    def batch_credits(self, groups: Sequence[Group], total: Total) -> list[Tensor]:
        credits = [self.credits(group) for group in groups]
        if self.scale_rewards != "batch":
            return credits
        scale = deviation([group.rewards_G for group in groups], total)
        return [credit / (scale + 1e-6) for credit in credits]

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        for batch in batches:
            batch.advantages_BT = self.advantages(batch)
        if self.whiten:
            whiten(batches, total)
        # the losses of a subclass know nothing of weights, but are proportional to the advantage
        if self.correction is not None and type(self).token_losses is not PolicyGradient.token_losses:
            for batch in batches:
                batch.advantages_BT = batch.advantages_BT * self._weights(batch)

    def advantages(self, batch: TrainBatch) -> Tensor:
        """Return the advantage of each token (B, T)."""
        return batch.credits_BT

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        if "old_logprobs_BT" not in batch.later:  # see `Needs.old_in_losses`
            batch.old_logprobs_BT = logprobs_BT.detach()
        loss_BT, metrics = self.surrogate(batch, logprobs_BT)
        if self.correction is not None and type(self).token_losses is PolicyGradient.token_losses:
            loss_BT = loss_BT * self._weights(batch)
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        metrics = {"policy_loss": loss_BT, "ratio/mean": ratio_BT, "ratio/max": ratio_BT, **metrics}
        if self.kl_coef > 0:
            metrics["kl"] = kl_loss(logprobs_BT, batch.ref_logprobs_BT, self.kl_estimator)
            if self.kl_in == "loss":
                penalty_BT = metrics["kl"]
                if self.kl_weighted:  # the ratio has the gradient that `kl_loss` gives to k1 and k3+
                    penalty_BT = kl(logprobs_BT, batch.ref_logprobs_BT, self.kl_estimator)
                    penalty_BT = penalty_BT * (logprobs_BT - batch.sampled_logprobs_BT).exp()
                loss_BT = loss_BT + self.kl_coef * self._kl_factor * penalty_BT
        if entropy_BT is not None:
            metrics["entropy"] = entropy_BT
            loss_BT = loss_BT - self.entropy_coef * entropy_BT
        return loss_BT, metrics

    def _weights(self, batch: TrainBatch) -> Tensor:
        weights_of = load("rl4llm.algorithms.correction:correction_weights")
        return cast(Tensor, weights_of(batch, self.correction, self.correction_low, self.correction_high))

    @abstractmethod
    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        """Return the loss of each token (B, T) without penalties and bonuses, and the method's metrics."""

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
        BaseAlgorithm.check(self, group_size)
        name = ALGORITHMS.name_of(type(self))
        if self.compares and group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.name={name!r}: rewards are compared "
                "within a group, so a group of one has zero advantage. Use 2 or more."
            )
        if self.correction is not None:
            CORRECTIONS[self.correction]
        reference, in_loss = self.needs().reference, self.kl_in == "loss"
        for key, is_set, accepted, step in (
            ("kl_target", self.kl_target is not None, reference, "kl_coef above 0"),
            ("reference_every", self.reference_every > 0, reference, "kl_coef above 0"),
            ("kl_weighted", self.kl_weighted, reference and in_loss, "kl_coef above 0 and kl_in=loss"),
            (
                "correction",
                self.correction is not None,
                self.old_logprobs == "recomputed",
                "old_logprobs=recomputed",
            ),
        ):
            if is_set and not accepted:
                raise ConfigError(f"algorithm.{key} has no effect. Set algorithm.{step} too.")


READERS = {name: getattr(PolicyGradient, name) for name in ("assign", "advantages", "token_losses")}
"""Methods that read no old log-probs before `surrogate`; those of a subclass may."""
