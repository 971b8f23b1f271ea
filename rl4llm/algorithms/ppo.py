"""PPO: Proximal Policy Optimization with a critic (Schulman et al. 2017; Ouyang et al. 2022 for language models)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.functional import clipped_value_loss
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import WITHOUT_GROUPS, Choices, ScaleRewards
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.algorithms.returns import gae, token_rewards, turn_rewards
from rl4llm.core.base_algorithm import Critic, KLEstimator, Needs, Total
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, TrainBatch


@register_algorithm("ppo")
@dataclass(slots=True)
class PPO(GRPO):
    """A value model says what each state was worth; advantages are generalized advantage estimates, whitened.

    States are the moments before the policy's own tokens; those of the environment are skipped over. Four frameworks walk
    over them and are wrong by up to 0.7 in multi-turn episodes (see `tests/algorithms/test_golden.py`).

    Options:
        gamma, lam: discount and lambda of the estimates, per token of the policy.
        value_clip: the value may move so far from the one before the update (PPO's clip for values); null never clips.
        critic_path: model that the critic starts from, or the critic of a run; null is `model.path`.
        critic_lr: null is `training.lr`.
        critic_epochs: passes of the critic over a rollout; those of the policy are `training.epochs`.
        critic_warmup_steps: the first steps, in which only the critic learns; all of `max_steps` train a value model alone.
    """

    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float | None = 0.2
    critic_path: str | None = None
    critic_lr: float | None = None
    critic_epochs: int = 1
    critic_warmup_steps: int = 0
    scale_rewards: ScaleRewards = "none"
    whiten: bool = True
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    credits_turns: ClassVar[bool] = False
    choices: ClassVar[Choices] = {**GRPO.choices, **WITHOUT_GROUPS}
    at_least_0: ClassVar[tuple[str, ...]] = (*GRPO.at_least_0, "critic_warmup_steps")

    def needs(self) -> Needs:
        critic = Critic(self.critic_path, self.critic_lr, self.critic_epochs, self.critic_warmup_steps)
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
        """The advantage of each token (B, T) for a lambda."""
        kl_coef = self.kl_coef * self._kl_factor if self.kl_in == "reward" else 0.0
        return gae(token_rewards(batch, kl_coef, self.kl_estimator), batch.values_BT, batch, self.gamma, lam)

    def policy_lambda(self, batch: TrainBatch) -> float | Tensor:
        """The lambda of the policy's advantages."""
        return self.lam

    def critic_lambda(self, batch: TrainBatch) -> float | Tensor:
        """The lambda of the critic's targets."""
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

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        for key in ("gamma", "lam"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)} is not accepted: 0 to 1.")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(f"algorithm.value_clip={self.value_clip} is not accepted: above 0, or null for none.")
        if self.critic_epochs < 1:
            raise ConfigError(f"algorithm.critic_epochs={self.critic_epochs} is not accepted: 1 or above.")
