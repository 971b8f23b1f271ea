"""BNPO: GRPO's advantages and clip, with one mean over all tokens of the batch (TRL's loss_type "bnpo")."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO


@dataclass(slots=True)
class BNPO(GRPO):
    """GRPO in which every token of an optimizer step has the same weight, so long answers count more than short ones.

    TRL averages over each micro-batch, so that its size and padding change the gradient. Here the batch is the whole
    optimizer step. Against DAPO, which averages alike, both bounds of the ratio are 0.2 and no group is dropped; Dr. GRPO
    divides by a constant. It is not Beta Normalization (Xiao et al. 2025), which has the same initials.
    """

    aggregation: str = "token"
