"""VAPO: value-based augmented PPO for long reasoning (Yue et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.ppo import PPO
from rl4llm.algorithms.sequences import Sequences, sequence_sum, turn_ends
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Natural, NonNegative, Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class VAPO(PPO):
    """PPO whose critic learns from whole returns, whose lambda grows with the answer, and which imitates its successes.

    - Decoupled estimates (section 4.1): lambda is 1 for the critic's targets.
    - Length-adaptive lambda (section 4.2, equation 5): 1 - 1 / (alpha l) for an answer of l tokens.
    - Positive-example loss (section 4.3, equation 7): the negative log-likelihood of tokens of rewarded trajectories, here
      with the weights of the batch instead of a separate mean, so that it does not depend on the number of successes.
    - Clip-higher, the mean over all tokens and value pretraining (`critic_warmup_steps`) as in DAPO and VC-PPO.

    Options:
        alpha: coefficient of the length-adaptive lambda; null uses `lam` for the policy.
        nll_coef: weight of the positive-example loss.
    """

    alpha: Positive | None = 0.05
    nll_coef: NonNegative = 0.1
    clip_high: Positive = 0.28
    critic_warmup_steps: Natural = 50

    def critic_lambda(self, batch: TrainBatch) -> float | Tensor:
        return 1.0

    def policy_lambda(self, batch: TrainBatch) -> float | Tensor:
        if self.alpha is None:
            return self.lam
        lengths_S = Sequences.of(batch).lengths_S.double()
        return (1 - 1 / (self.alpha * lengths_S)).clamp(min=0)[:, None]

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        loss_BT, metrics = PPO.surrogate(self, batch, logprobs_BT)
        positive_BT = sequence_sum(batch.credits_BT * turn_ends(batch), batch) > 0
        nll_BT = -logprobs_BT * positive_BT
        return loss_BT + self.nll_coef * nll_BT, metrics | {"positive_nll": nll_BT}
