"""Loss aggregation: the weight of each token in the loss of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry
from rl4llm.core.types import Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The policy tokens, trajectories and prompts that one optimizer step trains on, over all micro-batches and ranks.

    A prompt counts once per group, that is once per draw and per role.
    `constant_length` is the divisor of the aggregation "constant", in tokens.
    """

    tokens: int
    sequences: int
    prompts: int = 1
    constant_length: int = 0

    def __add__(self, other: StepTotals) -> StepTotals:
        counts = (self.tokens + other.tokens, self.sequences + other.sequences, self.prompts + other.prompts)
        return StepTotals(*counts, self.constant_length)


def totals_of(trajectories: Sequence[Trajectory], *, constant_length: int = 0) -> StepTotals:
    """Return the totals of one optimizer step on this rank; add those of other ranks before packing."""
    tokens = sum(trajectory.num_policy_tokens for trajectory in trajectories)
    prompts = len({trajectory.group_key for trajectory in trajectories})
    return StepTotals(tokens, len(trajectories), prompts, constant_length)


# (policy tokens and prompt number of each trajectory, totals of the step) -> weight of one token of each trajectory
Aggregation = Callable[[Ints, Ints, StepTotals], Floats]
AGGREGATIONS: Registry[Aggregation] = Registry("algorithm.aggregation")


@AGGREGATIONS.register("token")
def _each_token_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over all tokens of the step. Yu et al. 2025 (DAPO), section 3.3."""
    return np.full(len(policy_tokens), 1 / max(totals.tokens, 1))


@AGGREGATIONS.register("sequence")
def _each_trajectory_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over trajectories of their means over tokens. Shao et al. 2024 (DeepSeekMath), equation 3."""
    return 1 / (policy_tokens.clip(1) * totals.sequences)


@AGGREGATIONS.register("prompt")
def _each_prompt_alike(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over prompts of the means over all tokens of their trajectories. Yu et al. 2025 (DAPO), equation 8."""
    return 1 / (np.bincount(prompts, weights=policy_tokens).clip(1)[prompts] * totals.prompts)


@AGGREGATIONS.register("constant")
def _constant_divisor(policy_tokens: Ints, prompts: Ints, totals: StepTotals) -> Floats:
    """The mean over trajectories of their sums over a constant. Liu et al. 2025 (Dr. GRPO), section 3.2."""
    if totals.constant_length < 1:
        raise ConfigError(
            f"algorithm.aggregation='constant' divides by a fixed number of tokens, but training.constant_length="
            f"{totals.constant_length}. Set it to the number of tokens of the longest completion, 1 or more."
        )
    return np.full(len(policy_tokens), 1 / (totals.constant_length * totals.sequences))


def check_aggregation(name: str, constant_length: int) -> None:
    """Raise ConfigError for an unknown aggregation, and for 'constant' without a length to divide by."""
    AGGREGATIONS[name](np.ones(1, np.int64), np.zeros(1, np.int64), StepTotals(1, 1, 1, constant_length))
