"""DAPO's objective: Decoupled clip and dynamic sampling (Yu et al. 2025, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.types import Group


@register_algorithm("dapo")
@dataclass(slots=True)
class DAPO(GRPO):
    """GRPO with a higher upper clip, every token of the batch weighing the same, and no groups without a difference.

    The soft penalty for overlong answers (equation 13) is a reward: `rl4llm.rewards.overlong`.
    """

    clip_high: float = 0.28
    aggregation: str = "token"

    def keep(self, group: Group) -> bool:
        """A group whose rewards are all equal says nothing; the paper samples on until every group has a difference."""
        rewards_G = group.rewards_G
        return bool((rewards_G != rewards_G[0]).any())
