"""DPO: Direct Preference Optimization, from a dataset of pairs (Rafailov et al. 2023) or from an environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.algorithms.pairs import pair_difference
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.algorithms.sequences import sequence_mean, sequence_sum
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.types import Group, TrainBatch

LOSSES = ("sigmoid", "ipo")


@register_algorithm("dpo")
@dataclass(slots=True)
class DPO(BaseAlgorithm):
    """The chosen answer becomes likelier than the rejected one, measured against the reference; no reward, no sampling.

    With d = log(policy / reference) of the chosen answer less that of the rejected one, summed over their tokens, the loss
    of a pair is -log sigmoid(beta d) (Rafailov et al. 2023, equation 7). It stands on each token of the pair, so that the
    mean over trajectories is the mean over pairs; the aggregation is no option.

    Options:
        beta: how close the policy stays to the reference; larger is closer.
        loss: "sigmoid", or "ipo", (d - 1 / (2 beta))^2, which stops at a margin (Azar et al. 2024, equation 17).
        label_smoothing: share of pairs that are thought to be labelled the wrong way round (Mitchell 2023, "conservative
            DPO"); TRL's "robust" loss also divides by 1 - 2 label_smoothing.
        length_normalized: d is taken of means over tokens instead of sums. TRL and AReaL do so for "ipo", as its authors
            advise; OpenRLHF sums.
        nll_coef: weight of the negative log-likelihood of the chosen answer, a mean over its tokens (Pang et al. 2024,
            equation 2), against answers that both become unlikely.
    """

    beta: float = 0.1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False
    nll_coef: float = 0.0

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
        chosen_BT = 2.0 * (batch.credits_BT > 0)  # of a pair's two trajectories one: twice makes a mean over pairs
        if self.nll_coef:
            loss_BT = loss_BT - self.nll_coef * chosen_BT * logprobs_BT
        return loss_BT, {
            "dpo/accuracy/weighted": (margin_BT > 0).to(loss_BT.dtype),
            "dpo/margin/weighted": self.beta * margin_BT,
            "dpo/chosen/weighted": self.beta * chosen_BT * drift_BT,
        }

    def pair_loss(self, margin_BT: Tensor) -> Tensor:
        """The loss of a pair by its d."""
        if self.loss == "ipo":
            return (margin_BT - 1 / (2 * self.beta)).square()
        right_BT, wrong_BT = -F.logsigmoid(self.beta * margin_BT), -F.logsigmoid(-self.beta * margin_BT)
        return (1 - self.label_smoothing) * right_BT + self.label_smoothing * wrong_BT

    def check(self, group_size: int) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(unknown("algorithm.loss", str(self.loss), LOSSES))
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"algorithm.beta={self.beta} is not accepted: above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"algorithm.label_smoothing={self.label_smoothing} is not accepted: 0 to below 0.5.")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(f"algorithm.label_smoothing is for algorithm.loss=sigmoid; it is {self.loss!r}.")
        if not 0 <= self.nll_coef < math.inf:
            raise ConfigError(f"algorithm.nll_coef={self.nll_coef} is not accepted: 0 or above.")


@register_algorithm("online_dpo")
@dataclass(slots=True)
class OnlineDPO(DPO):
    """DPO on what the policy samples itself: of each prompt the best answer against the worst (Guo et al. 2024).

    The reward stands in for the judge of the paper. Groups whose rewards are all equal have no pair, and answers between
    best and worst take no part; neither counts in the mean over pairs.

    Options beside those of "dpo":
        reference_every: steps after which the policy becomes the reference; 0 is never.
    """

    reference_every: int = 0

    def needs(self) -> Needs:
        return replace(DPO.needs(self), learns_from="episodes", group=True, reference_every=self.reference_every)

    def keep(self, group: Group) -> bool:
        return bool(group.rewards_G.max() > group.rewards_G.min())

    def credits(self, group: Group) -> Tensor:
        """1 for the best, -1 for the worst, the first of equals; NaN, no part in this step, for all others."""
        rewards_G = group.rewards_G
        credits_G = torch.full_like(rewards_G, torch.nan)
        credits_G[rewards_G.argmax()], credits_G[rewards_G.argmin()] = 1.0, -1.0
        return credits_G

    def check(self, group_size: int) -> None:
        DPO.check(self, group_size)
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.name='online_dpo': a pair is made of the "
                "best and the worst answer to a prompt. Use 2 or more."
            )
        if self.reference_every < 0:
            raise ConfigError(f"algorithm.reference_every={self.reference_every} is not accepted: 0 (never) or above.")
