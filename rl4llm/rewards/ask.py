"""Run one reward over a batch of samples, with a deadline, in a thread; report failures by sample and kind."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeGuard

from torch import Tensor

from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.core.base_reward import policy_messages
from rl4llm.core.errors import RewardError
from rl4llm.rewards.pool import RewardFailure
from rl4llm.runtime.raised import raised
from rl4llm.runtime.threads import repeated

SLOW_AFTER_S = 60.0
logger = logging.getLogger("rl4llm.rewards")


@dataclass(frozen=True, slots=True)
class Broken:
    """Why a score is missing, with its kind: raised, timeout, unavailable or invalid."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines of a reward in seconds: `slow_after_s` for a warning, `timeout_s`, counted from `start`, to abandon it."""

    slow_after_s: float
    timeout_s: float | None
    start: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        return None if self.timeout_s is None else max(0.0, self.start + self.timeout_s - time.monotonic())


def ask(
    reward_function: BaseRewardFunction, samples: Sequence[SampleState], patience: Patience
) -> list[list[float] | Broken]:
    """Return finite scores for each sample, one or one per turn, or why they are missing."""
    if not samples:
        return []
    raw = _run(reward_function, samples, patience)
    if isinstance(raw, Broken):
        return [raw] * len(samples)
    if isinstance(raw, Exception):
        logger.warning(
            "%s on a batch of %d; asking sample by sample.", _raised(reward_function, raw), len(samples)
        )
        raw = [raw] * len(samples)
    scores = []
    for sample, value in zip(samples, raw, strict=True):
        result = _alone(reward_function, sample, patience) if _is_raised(value) else value
        scores.append(_checked(reward_function, result, sample))
    return scores


def as_number(value: Any) -> float:
    """Return a reward's result as a float; NaN for anything but a number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def as_list(name: str, scores: Any, expected: int) -> list[Any]:
    """Return a reward's scores for a batch as a list; raises RewardError unless there are `expected` of them."""
    scores = _plain(scores)
    if not isinstance(scores, list | tuple) or len(scores) != expected:
        result = f"{len(scores)} scores" if isinstance(scores, list | tuple) else brief(scores)
        accepted = f"Accepted: a list of {expected} numbers."
        raise RewardError(f"Reward {name!r} returned {result} for {expected} samples. {accepted}")
    for error in (score for score in scores if isinstance(score, RewardError)):  # it broke its contract
        raise error
    return list(scores)


def brief(value: Any) -> str:
    """Return a value for a message, or its type if it is not plain and short."""
    plain = value is None or isinstance(
        value, bool | int | float | complex | str | bytes | list | tuple | dict
    )
    try:
        return f"{value!r:.100}" if plain else f"a {type(value).__name__}"
    except ValueError:  # an integer with more digits than Python prints
        return f"a huge {type(value).__name__}"


def _is_raised(value: Any) -> TypeGuard[Exception]:
    """Return whether a reward raised for this sample and may succeed when retried; a RewardFailure does not."""
    return isinstance(value, Exception) and not isinstance(value, RewardFailure)


def _alone(reward_function: BaseRewardFunction, sample: SampleState, patience: Patience) -> Any:
    if patience.left_s == 0:
        return _late(reward_function, 1, patience)
    raw = _run(reward_function, [sample], patience)
    result = raw[0] if isinstance(raw, list) else raw
    return Broken("raised", _raised(reward_function, result)) if _is_raised(result) else result


def _run(
    reward_function: BaseRewardFunction, samples: Sequence[SampleState], patience: Patience
) -> list[Any] | Exception | Broken:
    """Return the scores as a list of the right length, what the reward raised, or that it took too long."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(reward_function.score_batch(samples))
        except SystemExit as error:
            result.append(RuntimeError("it called sys.exit").with_traceback(error.__traceback__))
        except BaseException as error:  # noqa: BLE001 - one of the two places: a reward's own code
            result.append(error)

    with _lending_copies(samples), _watched(reward_function.name, len(samples), patience.slow_after_s):
        if patience.timeout_s is None:
            call()
        else:
            thread = threading.Thread(target=call, name=f"rl4llm-reward-{reward_function.name}", daemon=True)
            thread.start()
            thread.join(patience.left_s)
    if not result:
        return _late(reward_function, len(samples), patience)
    if isinstance(result[0], Exception) and not isinstance(result[0], RewardError):
        return result[0]
    if isinstance(result[0], BaseException):  # an interruption concerns the whole program
        raise result[0]
    return as_list(reward_function.name, result[0], len(samples))


@contextlib.contextmanager
def _lending_copies(samples: Sequence[SampleState]) -> Iterator[None]:
    """Let a reward change the messages it gets: neither the log nor other rewards see that."""
    originals = [sample.messages for sample in samples]
    for sample, messages in zip(samples, originals, strict=True):
        sample.messages = [copy.deepcopy(message) if message.tool_calls else message for message in messages]
    try:
        yield
    finally:
        for sample, messages in zip(samples, originals, strict=True):
            sample.messages = messages


def _late(reward_function: BaseRewardFunction, num_samples: int, patience: Patience) -> Broken:
    late = f"reward {reward_function.name!r} took more than {patience.timeout_s:g} s on {num_samples} samples"
    return Broken("timeout", late)


def _checked(reward: BaseRewardFunction, value: Any, sample: SampleState) -> list[float] | Broken:
    """Return the score, or those of the turns, if they are finite numbers, else why they are not."""
    if isinstance(value, Broken):
        return value
    alone, turns = not reward.per_turn or isinstance(value, Exception), len(policy_messages(sample))
    value = value if alone else _plain(value)
    if not alone and not (isinstance(value, list | tuple) and len(value) == turns):
        reason = f"reward {reward.name!r} returned {brief(value)}, not a list of {turns} numbers, one for each turn"
        return Broken("invalid", reason)
    values = [value] if alone else value
    for failure in (item for item in values if isinstance(item, RewardFailure)):
        return Broken("unavailable", f"reward {reward.name!r} could not be computed: {failure}")
    numbers = [as_number(item) for item in values]
    for item, number in zip(values, numbers, strict=True):
        if not math.isfinite(number):
            return Broken("invalid", f"reward {reward.name!r} returned {brief(item)}, not a finite number")
    return numbers


def _plain(value: Any) -> Any:
    """Return a tensor or an array as a number or a list of numbers."""
    return value.tolist() if isinstance(value, Tensor) or type(value).__module__ == "numpy" else value


def _watched(name: str, num_samples: int, slow_after_s: float) -> AbstractContextManager[None]:
    """Log a warning at intervals while a slow reward runs."""
    seconds = count(slow_after_s, slow_after_s)
    slow = "Reward %r has been running for %g s on %d samples."
    return repeated(
        slow_after_s, lambda: logger.warning(slow, name, next(seconds), num_samples), f"rl4llm-watch-{name}"
    )


def _raised(reward_function: BaseRewardFunction, error: Exception) -> str:
    wants_main = "main thread" in str(error) and reward_function.score_timeout_s is not None
    hint = " (with score_timeout_s = None it runs in the main thread)" if wants_main else ""
    function = getattr(reward_function, "function", type(reward_function).__call__)
    return f"{raised(f'reward {reward_function.name!r}', error, function)}{hint}"
