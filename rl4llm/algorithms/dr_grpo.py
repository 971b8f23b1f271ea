"""Dr. GRPO: GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.policy_gradient import ScaleRewards


@dataclass(slots=True)
class DrGRPO(GRPO):
    """Remove two biases of GRPO: do not divide by the group's deviation, and divide by a constant, not by answer length.

    The constant is `training.constant_length`, the same in every step, as in TRL and SkyRL; verl's default divides by the
    width of the padded batch, which changes with the longest answer.
    """

    scale_rewards: ScaleRewards = "none"
    aggregation: str = "constant"
