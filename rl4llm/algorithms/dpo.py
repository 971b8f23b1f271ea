"""DPO: Direct Preference Optimization, from a dataset of pairs (Rafailov et al. 2023) or from an environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.algorithms.functional import differ
from rl4llm.algorithms.sequences import pair_difference, sequence_mean, sequence_sum
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Natural, NonNegative, Positive, Range
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class DPO(BaseAlgorithm):
    """Make the chosen answer more likely than the rejected one, relative to the reference; nothing is sampled or scored.

    With d = log(policy / reference) of the chosen answer less that of the rejected one, summed over their tokens, the loss
    of a pair is -log sigmoid(beta d) (Rafailov et al. 2023, equation 7). Each token of the pair carries it, so that the
    mean over trajectories is the mean over pairs. The aggregation is fixed.

    Options:
        beta: strength of the pull towards the reference.
        loss: "sigmoid", or "ipo", (d - 1 / (2 beta))^2, which stops at a margin (Azar et al. 2024, equation 17).
        label_smoothing: assumed share of pairs with swapped labels (Mitchell 2023, "conservative
            DPO"); TRL's "robust" loss also divides by 1 - 2 label_smoothing.
        length_normalized: take d of means over tokens instead of sums. TRL and AReaL do this for "ipo", as its authors
            advise; OpenRLHF sums.
        nll_coef: weight of the negative log-likelihood of the chosen answer, a mean over its tokens (Pang et al. 2024,
            equation 2). It keeps both answers from becoming unlikely.
    """

    beta: Positive = 0.1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Range(0, 0.5, without=0.5)] = 0.0
    length_normalized: bool = False
    nll_coef: NonNegative = 0.0

    aggregation: ClassVar[str] = "sequence"

    def needs(self) -> Needs:
        return Needs(learns_from="pairs", whole_groups=True, reference=True)

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        of_sequence = sequence_mean if self.length_normalized else sequence_sum
        drift_BT = of_sequence(logprobs_BT - batch.ref_logprobs_BT, batch)
        margin_BT = pair_difference(drift_BT, batch)
        loss_BT = self.pair_loss(margin_BT)
        # of a pair's two trajectories one: twice makes a mean over pairs
        chosen_BT = 2.0 * (batch.credits_BT > 0)
        if self.nll_coef:
            loss_BT = loss_BT - self.nll_coef * chosen_BT * logprobs_BT
        return loss_BT, {
            "dpo/accuracy/weighted": (margin_BT > 0).to(loss_BT.dtype),
            "dpo/margin/weighted": self.beta * margin_BT,
            "dpo/chosen/weighted": self.beta * chosen_BT * drift_BT,
        }

    def pair_loss(self, margin_BT: Tensor) -> Tensor:
        """Return the loss of each pair (B, T) for its d (B, T)."""
        if self.loss == "ipo":
            return (margin_BT - 1 / (2 * self.beta)).square()
        right_BT, wrong_BT = -F.logsigmoid(self.beta * margin_BT), -F.logsigmoid(-self.beta * margin_BT)
        return (1 - self.label_smoothing) * right_BT + self.label_smoothing * wrong_BT

    def check(self, group_size: int) -> None:
        BaseAlgorithm.check(self, group_size)
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"algorithm.label_smoothing requires algorithm.loss=sigmoid, not {self.loss!r}. Set it to 0."
            )


@dataclass(slots=True)
class OnlineDPO(DPO):
    """DPO on the policy's own samples: the best answer to each prompt against the worst (Guo et al. 2024).

    The reward replaces the paper's judge. Groups with equal rewards form no pair, and answers between best and worst are
    left out; neither counts in the mean over pairs.

    Options beside those of "dpo":
        reference_every: every this many steps the policy becomes the reference; 0 disables it.
    """

    reference_every: Natural = 0

    def needs(self) -> Needs:
        return replace(
            DPO.needs(self), learns_from="episodes", group=True, reference_every=self.reference_every
        )

    def keep(self, group: Group) -> bool:
        return differ(group.rewards_G.tolist())

    def credits(self, group: Group) -> Tensor:
        """Return 1 for the best answer, -1 for the worst and 0 for the others, which do not train (G,).

        Of equal rewards the first counts.
        """
        rewards_G = group.rewards_G
        credits_G = torch.zeros_like(rewards_G)
        credits_G[rewards_G.argmax()], credits_G[rewards_G.argmin()] = 1.0, -1.0
        return credits_G

    def learners(self, group: Group) -> list[bool]:
        return self.credits(group).bool().tolist()

    def check(self, group_size: int) -> None:
        DPO.check(self, group_size)
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.name='online_dpo': a pair is made of the "
                "best and the worst answer to a prompt. Use 2 or more."
            )
