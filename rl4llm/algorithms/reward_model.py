"""Reward models give each conversation a number and learn it from pairs (Bradley and Terry 1952; Ouyang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.algorithms.sequences import pair_difference
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class RewardModel(BaseAlgorithm):
    """Minimize -log sigmoid(reward of the chosen answer - reward of the rejected one - margin), the mean over pairs.

    Ouyang et al. 2022, equation 1; the margin is the pair's column "margin", by default 0 (Touvron et al. 2023, Llama 2,
    equation 2). The reward is the value after the last token of the rendered conversation. The exported model is a reward
    for later runs: ``rewards: [{name: reward_model, path: DIRECTORY}]``. Only differences between rewards are
    learned, so their zero is arbitrary, which does not affect group-relative methods.
    """

    aggregation: ClassVar[str] = "sequence"

    def needs(self) -> Needs:
        return Needs(learns_from="comparisons", whole_groups=True, value_head=True)

    def credits(self, group: Group) -> Tensor:
        """Return 1 + margin for the chosen answer and -1 for the rejected one (G,)."""
        margins_G = torch.tensor(
            [t.extras.get("margin", 0.0) for t in group.trajectories], dtype=torch.float64
        )
        return group.rewards_G + margins_G * (group.rewards_G > 0)

    def token_losses(
        self, batch: TrainBatch, rewards_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        difference_BT = pair_difference(rewards_BT, batch)
        margin_BT = pair_difference(batch.credits_BT, batch) - 2
        loss_BT = -F.logsigmoid(difference_BT - margin_BT.to(difference_BT.dtype))
        return loss_BT, {
            "rm/accuracy/weighted": (difference_BT > 0).to(loss_BT.dtype),
            "rm/margin/weighted": difference_BT,
        }
