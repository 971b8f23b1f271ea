"""BNPO is TRL's `loss_type="bnpo"`: GRPO with equal weights for all tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO


@dataclass(slots=True)
class BNPO(GRPO):
    """GRPO with the mean over all tokens of the step.

    TRL divides by the tokens of each process's micro-batch, so its loss depends on the batch size. This class divides by
    the tokens of the whole step. It is not Beta normalization, which has the same abbreviation (Xiao et al. 2025).
    """

    aggregation: str = "token"
