"""TRL's reward functions: ``f(completions, prompts, **columns)`` returns a number or None for each completion."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardTransform, SampleState
from rl4llm.core.errors import ConfigError, ModelError
from rl4llm.rewards import as_reward_function, weighted_sum
from rl4llm.rewards.ask import as_list
from rl4llm.rewards.callables import BatchCallable
from rl4llm.runtime.runner import awaited
from rl4llm_compat.trl.classifier import as_function
from rl4llm_compat.trl.environment import INSTANCE


def reward_functions(
    given: Any, weights: Sequence[float] | None, *, plain: bool
) -> tuple[list[BaseRewardFunction | str], RewardTransform | None]:
    """Return the rewards of `reward_funcs`, and their weighted sum as TRL computes it.

    Functions are called like TRL calls them, and so are classifiers, see `Classifier`. "sandbox" is the reward `code`, and
    everything else is passed to `rl4llm.rewards.as_reward_function`; a string of another directory or with a "/" is a
    reward model of rl4llm. `plain` means that
    prompts, and so completions, are strings. Raises ConfigError unless there is one weight for each.
    """
    items = [
        as_function(item, plain=plain) for item in (given if isinstance(given, list | tuple) else [given])
    ]
    weights = [1.0] * len(items) if weights is None else list(weights)
    if len(weights) != len(items) or not items:
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(items)} reward_funcs. Give one number for each."
        )
    answers = BatchAnswers(sum(_is_function(item) for item in items))
    places = itertools.count()
    made = [_made(item, answers, places, plain=plain) for item in items]
    names = [reward if isinstance(reward, str) else reward.name for reward in made]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"reward_funcs: two have the same name: {', '.join(names)}. Give each a different name."
        )
    if weights == [1.0]:
        return made, None
    return made, weighted_sum({name: float(weight) for name, weight in zip(names, weights, strict=True)})


def _made(
    item: Any, answers: BatchAnswers, places: Iterator[int], *, plain: bool
) -> BaseRewardFunction | str:
    """Return a reward; the one that runs programs stays a name, since the run provides its sandbox."""
    if item in ("sandbox", "code"):
        return "code"
    if _is_function(item):
        return TRLReward(item, answers, next(places), plain=plain)
    if isinstance(item, str) and ("/" in item or Path(item).is_dir()):
        try:
            return as_reward_function({"name": "reward_model", "path": item})
        except ModelError as error:
            raise ModelError(f"reward_funcs={item!r}: {error}") from error
    return as_reward_function(item)


def _is_function(item: Any) -> bool:
    return callable(item) and not isinstance(item, BaseRewardFunction) and not inspect.isclass(item)


@dataclass(slots=True)
class BatchAnswers:
    """Whether a sample got a number from any of `functions` functions, which are called one after the other."""

    functions: int
    # by the id of the sample, which exists while it is scored
    _judged: dict[int, bool] = field(default_factory=dict)

    def note(self, sample: SampleState, place: int, score: Any) -> Any:
        """Return the score of the function at this place: 0 for None, but NaN if it is the last and all returned None."""
        judges = score is not None and not (isinstance(score, float) and isnan(score))
        before = self._judged.pop(id(sample), False) if place else False  # the first function resets it
        self._judged[id(sample)] = before or judges
        if judges:
            return score
        last = place == self.functions - 1
        return nan if last and not before else 0.0


class TRLReward(BatchCallable):
    """A function called like TRL calls it.

    `completions` are lists of one or more messages if prompts are messages, strings if prompts are strings; `prompts`
    likewise. The function also gets lists of the dataset's columns and `completion_ids` by name. None means that it
    does not score this completion; a completion without any score is left out.
    """

    by_name = True

    def __init__(self, function: Callable[..., Any], answers: BatchAnswers, place: int, *, plain: bool):
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        super().__init__(function, name)
        self.__qualname__ = getattr(function, "__qualname__", name)  # identifies it in a resumed run
        self._answers = answers
        self._place = place
        self._plain = plain

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        scores = as_list(self.name, super().score_batch(samples), len(samples))
        if self._place == self._answers.functions - 1:
            for sample in samples:
                sample.extras.pop(INSTANCE, None)
        return [
            self._answers.note(sample, self._place, score)
            for sample, score in zip(samples, scores, strict=True)
        ]

    def completions(self, samples: Sequence[SampleState]) -> list[Any]:
        if self._plain:
            return super().completions(samples)
        return [
            [message.to_dict() for message in sample.messages[sample.init_msg_size :]] for sample in samples
        ]

    def columns(self, samples: Sequence[SampleState]) -> dict[str, Any]:
        columns = super().columns(samples)
        columns["completion_ids"] = [
            [token for span in sample.policy_spans for token in span.token_ids] for sample in samples
        ]
        if self._plain:
            columns["prompts"] = [messages[-1]["content"] for messages in columns["prompts"]]
        if all(INSTANCE in sample.extras for sample in samples):
            columns["environments"] = [sample.extras[INSTANCE].made for sample in samples]
        return columns | {
            "log_metric": partial(_log_metric, samples),
            "log_extra": partial(_log_extra, samples),
        }


def _log_metric(samples: Sequence[SampleState], name: str, value: float) -> None:
    """Log a number as the metric ``env/<name>``."""
    for sample in samples:
        sample.extras["metrics"] = {**sample.extras.get("metrics", {}), str(name): float(value)}


def _log_extra(samples: Sequence[SampleState], column: str, values: Sequence[Any]) -> None:
    """Store a value with each episode."""
    for sample, value in zip(samples, values, strict=True):
        sample.extras[str(column)] = value


def of_environment(environments: Sequence[Any], **columns: Any) -> list[Any]:
    """Return what the environments of the samples say themselves, also if they are async."""
    return awaited([made.get_reward() for made in environments])
