"""PPO: Proximal Policy Optimization with a critic (Schulman et al. 2017; Ouyang et al. 2022 for language models)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.functional import clipped_value_loss
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch
from rl4llm.algorithms.returns import gae, token_rewards, turn_rewards
from rl4llm.core.base_algorithm import Critic, KLEstimator, Needs, Total
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Count, Fraction, Natural, NonNegative, Positive
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class PPO(GRPO):
    """Learn the value of each state with a critic; advantages are generalized advantage estimates, whitened.

    States are the moments before the policy's tokens; the environment's tokens are skipped. Four frameworks do not skip
    them and are wrong by up to 0.7 in multi-turn episodes (see `tests/algorithms/test_golden.py`).

    Options:
        gamma, lam: discount and lambda of the estimates, per token of the policy.
        value_clip: how far a value may move from its value before the update (PPO's clip); null disables it.
        critic_path: the model or trained critic that the critic starts from; null is `model.path`.
        critic_lr: learning rate of the critic; null is ten times `training.lr`.
        critic_passes: passes of the critic over a rollout; those of the policy are `training.passes_per_rollout`.
        critic_warmup_steps: first steps in which only the critic learns; with `max_steps` only a value model is trained.
    """

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    value_clip: Positive | None = 0.2
    critic_path: str | None = None
    critic_lr: NonNegative | None = None
    critic_passes: Count = 1
    critic_warmup_steps: Natural = 0
    scale_rewards: ScaleBatch = "none"
    whiten: bool = True
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    turn_discount: ClassVar[None] = None  # type: ignore[misc]  # `gamma` discounts tokens instead

    def needs(self) -> Needs:
        critic = Critic(self.critic_path, self.critic_lr, self.critic_passes, self.critic_warmup_steps)
        return replace(GRPO.needs(self), critic=critic, every_token=True, reward_kl=None)

    def credits(self, group: Group) -> Tensor:
        return turn_rewards(group)

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        for batch in batches:
            batch.returns_BT = self.estimates(batch, self.critic_lambda(batch)) + batch.values_BT
        GRPO.assign(self, batches, total)

    def advantages(self, batch: TrainBatch) -> Tensor:
        return self.estimates(batch, self.policy_lambda(batch))

    def estimates(self, batch: TrainBatch, lam: float | Tensor) -> Tensor:
        """Return the advantage of each token (B, T) for a lambda."""
        kl_coef = self.kl_coef * self._kl_factor if self.kl_in == "reward" else 0.0
        return gae(token_rewards(batch, kl_coef, self.kl_estimator), batch.values_BT, batch, self.gamma, lam)

    def policy_lambda(self, batch: TrainBatch) -> float | Tensor:
        """Return the lambda of the policy's advantages, a number or (S, 1)."""
        return self.lam

    def critic_lambda(self, batch: TrainBatch) -> float | Tensor:
        """Return the lambda of the critic's targets, a number or (S, 1)."""
        return self.lam

    def value_losses(self, batch: TrainBatch, values_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        loss_BT = clipped_value_loss(values_BT, batch.values_BT, batch.returns_BT, self.value_clip)
        error_BT = values_BT - batch.returns_BT
        return loss_BT, {
            "value_loss": loss_BT,
            "value/mean": values_BT,
            "return/mean": batch.returns_BT,
            "value/squared_error": error_BT.square(),
        }
