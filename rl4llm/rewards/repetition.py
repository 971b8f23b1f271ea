"""The penalty of saying the same again and again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.errors import RewardError
from rl4llm.core.schema import Count, NonNegative, Range, checked
from rl4llm.core.types import ChatMessage


class RepetitionPenalty(BaseRewardFunction):
    """0 while at most `allowed` of the n-grams of tokens occurred before, then falling to -factor where all but one did.

    It looks at the tokens that the policy sampled, over all turns, so that neither languages without spaces nor a loop over
    the same tool call escape it.

        >>> RepetitionPenalty(n=2, allowed=0.0).at([7, 8, 7, 8, 7, 8])
        -0.6

    Args:
        name: under which the score is logged.
        n: tokens that make a repetition.
        allowed: share of repeated n-grams that costs nothing.
        factor: the largest penalty is -factor.
    """

    needs_ground_truth = False

    @checked("rewards.{name}")
    def __init__(
        self,
        name: str = "repetition",
        *,
        n: Count = 8,
        allowed: Annotated[float, Range(0, 1, without=1)] = 0.2,
        factor: NonNegative = 1.0,
    ):
        super().__init__(name)
        self.n = n
        self.allowed = allowed
        self.factor = float(factor)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        raise RewardError(
            f"Reward {self.name!r} looks at tokens, which messages do not hold; use score_batch(samples)."
        )

    def score_batch(self, samples: Sequence[SampleState]) -> list[float]:
        return [
            self.at([token for span in sample.policy_spans for token in span.token_ids]) for sample in samples
        ]

    def at(self, token_ids: Sequence[int]) -> float:
        ngrams = list(zip(*(islice(token_ids, start, None) for start in range(self.n)), strict=False))
        if not ngrams:
            return 0.0
        repeated = 1 - len(set(ngrams)) / len(ngrams)
        excess = max(0.0, repeated - self.allowed) / (1 - self.allowed)
        return -self.factor * excess if excess else 0.0

    def examples(self) -> Sequence[RewardExample]:
        """Return tokens that all differ, and one token ten thousand times."""
        same = 10_000
        penalty = -self.factor * max(0.0, 1 - 1 / (same - self.n + 1) - self.allowed) / (1 - self.allowed)
        cases = ((range(same), 0.0), ((0,) * same, penalty))
        return [
            RewardExample([ChatMessage("assistant", "...")], "", score, token_ids=ids) for ids, score in cases
        ]
