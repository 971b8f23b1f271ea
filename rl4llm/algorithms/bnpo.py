"""BNPO, as TRL's `loss_type="bnpo"`: GRPO whose tokens all weigh the same."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.registry import register_algorithm


@register_algorithm("bnpo")
@dataclass(slots=True)
class BNPO(GRPO):
    """GRPO with the mean over all tokens of the step.

    TRL divides by the tokens of each process's own micro-batch, so its loss changes with the batch size; this one divides by
    those of the whole step. It is not the Beta normalization of the paper with the same abbreviation (Xiao et al. 2025).
    """

    aggregation: str = "token"
