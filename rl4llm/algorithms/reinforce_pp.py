"""REINFORCE++ (Hu 2025) needs no critic and no group; it normalizes advantages over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleBatch, ScaleRewards
from rl4llm.algorithms.returns import discounted_returns, token_rewards, turn_rewards
from rl4llm.core.base_algorithm import KLEstimator, Needs
from rl4llm.core.schema import Fraction
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class ReinforcePP(GRPO):
    """Compute returns over the policy's tokens, with the KL penalty in each token's reward, whitened over the batch.

    Tokens of the environment neither discount nor reset the return, as in verl; slime and OpenRLHF discount through them.

    Options:
        gamma: discount per token of the policy.
    """

    gamma: Fraction = 1.0
    scale_rewards: ScaleBatch = "none"
    whiten: bool = True
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    aggregation: str = "token"
    compares: ClassVar[bool] = False
    turn_discount: ClassVar[None] = None  # type: ignore[misc]  # `gamma` discounts tokens instead

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), every_token=True, reward_kl=None)

    def credits(self, group: Group) -> Tensor:
        return turn_rewards(group)

    def advantages(self, batch: TrainBatch) -> Tensor:
        kl_coef = self.kl_coef * self._kl_factor if self.kl_in == "reward" else 0.0
        return discounted_returns(token_rewards(batch, kl_coef, self.kl_estimator), batch, self.gamma)


@dataclass(slots=True)
class ReinforcePPBaseline(GRPO):
    """Subtract the mean reward of the prompt first; the penalty is k2 in the loss (section 3.3)."""

    scale_rewards: ScaleRewards = "none"
    whiten: bool = True
    kl_estimator: KLEstimator = "k2"
    aggregation: str = "token"
