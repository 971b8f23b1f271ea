"""The reward of a length within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.base_reward import policy_messages, policy_tokens
from rl4llm.core.errors import RewardError
from rl4llm.core.schema import Natural, checked
from rl4llm.core.types import ChatMessage


class LengthReward(BaseRewardFunction):
    """`inside` for a length from `min_length` to `max_length`, falling in a straight line to `outside` over `margin`.

    The length is that of everything the policy wrote in the episode. ``inside=0, outside=-1`` makes it a penalty.

        >>> LengthReward(max_length=100, margin=50, unit="chars").at(125)
        0.5

    Args:
        name: under which the score is logged.
        max_length: longest length that gets the full score.
        min_length: shortest length that gets it.
        margin: how far outside the bounds the score reaches `outside`; 0 for a step.
        unit: "tokens" that the policy sampled, or "chars" of its messages.
        inside: the score within the bounds.
        outside: the score far outside.
    """

    needs_ground_truth = False

    @checked("rewards.{name}")
    def __init__(
        self,
        name: str = "length",
        *,
        max_length: int,
        min_length: Natural = 0,
        margin: Natural = 0,
        unit: Literal["tokens", "chars"] = "tokens",
        inside: float = 1.0,
        outside: float = 0.0,
    ):
        super().__init__(name)
        self.max_length = max_length
        self.min_length = min_length
        self.margin = margin
        self.unit = unit
        self.inside = float(inside)
        self.outside = float(outside)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        """Return the score of the assistant messages given; tokens are not known here, see `score_batch`."""
        if self.unit == "tokens":
            raise RewardError(
                f"Reward {self.name!r} counts tokens, which messages do not hold; use score_batch(samples)."
            )
        return self.at(_chars(messages))

    def score_batch(self, samples: Sequence[SampleState]) -> list[float]:
        if self.unit == "tokens":
            return [self.at(policy_tokens(sample)) for sample in samples]
        return [self.at(_chars(policy_messages(sample))) for sample in samples]

    def at(self, length: int) -> float:
        excess = max(self.min_length - length, length - self.max_length, 0)
        if excess == 0:
            return self.inside
        share = min(1.0, excess / self.margin) if self.margin else 1.0
        return self.inside + share * (self.outside - self.inside)

    def examples(self) -> Sequence[RewardExample]:
        """Return the longest length with the full score and the shortest with the score `outside`."""
        lengths = ((self.max_length, self.inside), (self.max_length + max(self.margin, 1), self.outside))
        return [
            RewardExample([ChatMessage("assistant", "x" * length)], "", score, token_ids=range(length))
            for length, score in lengths
        ]


def _chars(messages: Sequence[ChatMessage]) -> int:
    return sum(len(message.content) for message in messages if message.role == "assistant")
