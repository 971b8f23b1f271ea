"""Dr. GRPO: GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleRewards
from rl4llm.algorithms.registry import register_algorithm


@register_algorithm("dr_grpo")
@dataclass(slots=True)
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, and a constant instead of each answer's length.

    The constant is `training.constant_length`, the same in every step, as in TRL and SkyRL; verl's default divides by the
    width of the padded batch, which changes with the longest answer.
    """

    scale_rewards: ScaleRewards = "none"
    aggregation: str = "constant"
