"""DAPO: Decoupled clip and dynamic sampling (Yu et al. 2025, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import Needs


@register_algorithm("dapo")
@dataclass(slots=True)
class DAPO(GRPO):
    """GRPO with a higher upper clip, every token of the batch weighing the same, and no groups without a difference.

    Prompts are sampled anew in place of groups that were dropped (section 3.2), so that every step trains on as many; after
    `refills` rounds a step goes on with what it has. The soft penalty for overlong answers (equation 13) is a reward,
    `rl4llm.rewards.overlong`; `mask_truncated` is the paper's overlong filtering.

    Strictly, equation 8 averages over the tokens of each prompt first (aggregation "prompt"); the paper's own code and most
    others average over those of the batch.

    Options:
        refills: how often prompts are sampled in place of dropped groups; 0 is never. The paper's recipe has 10.
    """

    clip_high: float = 0.28
    drop_equal: bool = True
    refills: int = 10
    aggregation: str = "token"

    at_least_0: ClassVar[tuple[str, ...]] = (*GRPO.at_least_0, "refills")

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), refills=self.refills if self.drop_equal else 0)
