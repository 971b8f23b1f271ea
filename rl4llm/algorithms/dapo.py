"""DAPO: Decoupled clip and dynamic sampling (Yu et al. 2025, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.schema import Natural, Positive


@dataclass(slots=True)
class DAPO(GRPO):
    """GRPO with a higher upper clip, equal weight for every token of the batch, and no zero-variance groups.

    Dynamic sampling (section 3.2) replaces dropped groups with further prompts, so that every step trains on the same number
    of groups. After `resampling_rounds` a step trains on the groups that it has. The soft penalty for overlong answers
    (equation 13) is a reward, `rl4llm.rewards.overlong`; `mask_truncated` is the paper's overlong filtering.

    Strictly, equation 8 averages over the tokens of each prompt first (aggregation "prompt"). The paper's own code and most
    other implementations average over the tokens of the batch.

    Options:
        resampling_rounds: most rounds of sampling in place of dropped groups; 0 disables it. The paper's recipe has 10.
    """

    clip_high: Positive = 0.28
    filter_groups: bool = True
    resampling_rounds: Natural = 10
    aggregation: str = "token"

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), refills=self.resampling_rounds if self.filter_groups else 0)
