"""Rewards made of other rewards: clipped, scaled, cut in two, or given only where another one holds.

In a configuration the wrapped reward is an option, a name or a mapping like any other:

    rewards:
      - {name: math}
      - {name: gate, reward: {name: length, max_length: 400, margin: 200}, by: math, weight: 0.2}

A wrapper is logged under the name of what it wraps unless it has a label. A failure of the wrapped reward stays one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.base_reward import BaseBatchReward, policy_messages
from rl4llm.core.errors import ConfigError
from rl4llm.rewards.ask import as_list, as_number
from rl4llm.rewards.callables import RewardLike, as_reward_function


class BaseWrapper(BaseBatchReward):
    """A reward that asks another one; subclasses say what becomes of its scores."""

    rewards_among_options: tuple[str, ...] = ("reward",)

    def __init__(self, reward: RewardLike, name: str | None = None):
        self.reward = as_reward_function(reward)
        super().__init__(name or self.reward.name)
        self.per_turn = self.reward.per_turn
        self.score_timeout_s = self.reward.score_timeout_s
        self.success_at = self.reward.success_at
        self.parts = (self.reward,)

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [self._changed(score) for score in _scores(self.reward, samples)]

    def examples(self) -> Sequence[RewardExample]:
        """Return the wrapped reward's examples with changed scores."""
        return [replace(example, score=self._changed(example.score)) for example in self.reward.examples()]

    @abstractmethod
    def change(self, score: float) -> float:
        """Return the changed score of a finite score."""

    def _changed(self, score: Any) -> Any:
        """Change the score, or each score of a list. Keep an invalid one, for whoever checks scores."""
        if isinstance(score, list | tuple):
            return [self._changed(turn) for turn in score]
        number = as_number(score)
        return self.change(number) if math.isfinite(number) else score


class Clip(BaseWrapper):
    """Clip the score of `reward` to at least `low` and at most `high`."""

    def __init__(
        self, reward: RewardLike, low: float = -math.inf, high: float = math.inf, *, name: str | None = None
    ):
        super().__init__(reward, name)
        if not low < high:
            raise ConfigError(f"rewards.{self.name}: low={low}, high={high} is not accepted: low < high.")
        self.low = low
        self.high = high
        if self.success_at is not None and not low < self.success_at <= high:
            self.success_at = None  # clipped scores do not tell success from failure

    def change(self, score: float) -> float:
        return min(max(score, self.low), self.high)


class Threshold(BaseWrapper):
    """`above` where `reward` gives at least `at_least`, else `below`."""

    def __init__(
        self,
        reward: RewardLike,
        at_least: float,
        *,
        above: float = 1.0,
        below: float = 0.0,
        name: str | None = None,
    ):
        super().__init__(reward, name)
        self.at_least = at_least
        self.above = above
        self.below = below
        self.success_at = float(above) if above > below else None

    def change(self, score: float) -> float:
        return float(self.above if score >= self.at_least else self.below)


class Scale(BaseWrapper):
    """The score of `reward` times `factor`, plus `offset`."""

    def __init__(
        self, reward: RewardLike, factor: float = 1.0, offset: float = 0.0, *, name: str | None = None
    ):
        super().__init__(reward, name)
        self.factor = factor
        self.offset = offset
        if self.success_at is not None:
            self.success_at = self.change(self.success_at) if factor > 0 else None

    def change(self, score: float) -> float:
        return score * self.factor + self.offset


class Gate(BaseWrapper):
    """The score of `reward` where `by`, another reward, gives at least `at_least`; `otherwise` everywhere else.

    What `by` does not let through is not shown to `reward` at all, which saves the calls of an expensive one.
    """

    rewards_among_options = ("reward", "by")

    def __init__(
        self,
        reward: RewardLike,
        by: RewardLike,
        *,
        at_least: float = 1.0,
        otherwise: float = 0.0,
        name: str | None = None,
    ):
        super().__init__(reward, name)
        self.by = as_reward_function(by)
        if self.by.per_turn:
            raise ConfigError(f"rewards.{self.name}.by={self.by.name!r} scores turns, not whole episodes.")
        self.at_least = at_least
        self.otherwise = float(otherwise)
        if self.success_at is not None and self.otherwise >= self.success_at:
            self.success_at = None
        self.parts = (self.reward, self.by)

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        gates = _scores(self.by, samples)
        opened = [index for index, gate in enumerate(gates) if as_number(gate) >= self.at_least]
        scores = [self._shut(sample, gate) for sample, gate in zip(samples, gates, strict=True)]
        if opened:
            for index, score in zip(
                opened, _scores(self.reward, [samples[index] for index in opened]), strict=True
            ):
                scores[index] = score
        return scores

    def examples(self) -> Sequence[RewardExample]:
        examples = [] if self.per_turn else self.by.examples()
        return [
            replace(case, score=self.otherwise) for case in examples if as_number(case.score) < self.at_least
        ]

    def change(self, score: float) -> float:
        return score

    def _shut(self, sample: SampleState, gate: Any) -> Any:
        """Return the score of a sample that the gate `gate` keeps out."""
        if not math.isfinite(as_number(gate)):
            # a failure, or no number at all: the sample must fail, not be shut out or get the gate's list
            return gate if isinstance(gate, Exception) or not self.per_turn else math.nan
        return [self.otherwise] * len(policy_messages(sample)) if self.per_turn else self.otherwise


def _scores(reward: BaseRewardFunction, samples: Sequence[SampleState]) -> list[Any]:
    return as_list(reward.name, reward.score_batch(samples), len(samples))
