"""DAPO's soft overlong punishment, which penalizes long replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.base_reward import policy_tokens
from rl4llm.core.errors import RewardError
from rl4llm.core.schema import Count, NonNegative, checked
from rl4llm.core.types import ChatMessage


class OverlongPenalty(BaseRewardFunction):
    """0 up to a soft limit, then falling in a straight line to -factor at the hard limit, and no further.

    DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13: with n policy tokens and soft limit = max_length - buffer,
    0 for n <= soft limit, (soft limit - n) / buffer up to max_length, -1 beyond, times `factor`.

        >>> [OverlongPenalty(max_length=100, buffer=20).at(length) for length in (80, 90, 100, 120)]
        [0.0, -0.5, -1.0, -1.0]

    Args:
        name: under which the score is logged.
        max_length: tokens of a reply at most, the L_max of the paper; over all turns of an episode.
        buffer: how many tokens before that the penalty begins, the paper's L_cache.
        factor: the largest penalty is -factor.
    """

    needs_ground_truth = False

    @checked("rewards.{name}")
    def __init__(self, name: str = "overlong", *, max_length: int, buffer: Count, factor: NonNegative = 1.0):
        super().__init__(name)
        self.max_length = max_length
        self.buffer = buffer
        self.factor = float(factor)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        raise RewardError(
            f"Reward {self.name!r} counts tokens, which messages do not hold; use score_batch(samples)."
        )

    def score_batch(self, samples: Sequence[SampleState]) -> list[float]:
        return [self.at(policy_tokens(sample)) for sample in samples]

    def examples(self) -> Sequence[RewardExample]:
        """Return the longest length without a penalty, and the shortest with the full one."""
        lengths = ((self.max_length - self.buffer, 0.0), (self.max_length, -self.factor))
        return [
            RewardExample([ChatMessage("assistant", "...")], "", score, token_ids=range(length))
            for length, score in lengths
        ]

    def at(self, length: int) -> float:
        """Return the penalty of a number of tokens."""
        excess = length - (self.max_length - self.buffer)
        return self.factor * -min(1.0, excess / self.buffer) if excess > 0 else 0.0
