"""All rewards over finished samples, with every fault of a reward kept to the sample it concerns."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.base_env import BaseRewardFunction, RewardTransform, SampleState
from rl4llm.core.errors import RewardError
from rl4llm.rewards.pool import RewardFailure

EXAMPLE_TOLERANCE = 1e-6
SLOW_AFTER_S = 60.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scores:
    """What N samples earned, float64 tensors of shape (N,), NaN where a sample failed.

    `notes` counts the reasons that rewards gave for scores, for example ``{"math/timeout": 2}``.
    """

    rewards: Mapping[str, Tensor]
    reward: Tensor
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Broken:
    """Why there is no score, and of what kind that is: raised, timeout, unavailable or invalid."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Patience:
    """After how many seconds a reward is named in the log, and after how many, counted from `start`, it is given up."""

    slow_after_s: float
    timeout_s: float | None
    start: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        return None if self.timeout_s is None else max(0.0, self.start + self.timeout_s - time.monotonic())


def score(
    samples: Sequence[SampleState],
    reward_functions: Sequence[BaseRewardFunction],
    reward_transform_fn: RewardTransform | None = None,
    *,
    timeout_s: float | None = None,
    slow_after_s: float = SLOW_AFTER_S,
) -> Scores:
    """Run every reward over the samples that have not failed.

    A reward that raises on the batch is asked again sample by sample, so that only those it cannot score fail. A sample
    whose score is no finite number fails too. `reward_transform_fn` sees the samples that are left, (num_samples,).
    A reward that runs longer than `slow_after_s` is named in the log, again and again. One that takes longer than its
    `score_timeout_s`, or than `timeout_s` where that is given, fails the samples that it has not scored by then. It runs in
    a thread of its own for that; a reward that needs the main thread, such as one that sets signals, has no time limit.

    Raises RewardError, which stops the run, when a reward breaks its contract for the whole batch: a wrong number of
    scores, no list, or a transform whose result is not (num_samples,) finite numbers.
    """
    rewards: dict[str, Tensor] = {}
    for reward_function in reward_functions:
        rewards[reward_function.name] = torch.full((len(samples),), math.nan, dtype=torch.float64)
        scorable = [index for index, sample in enumerate(samples) if sample.failure is None]
        patience = _Patience(slow_after_s, reward_function.score_timeout_s if timeout_s is None else timeout_s)
        values = _evaluate(reward_function, [samples[index] for index in scorable], patience)
        for index, value in zip(scorable, values, strict=True):
            if isinstance(value, _Broken):
                samples[index].fail(value.reason, f"{reward_function.name}/{value.kind}")
            else:
                rewards[reward_function.name][index] = value
    left = torch.tensor([sample.failure is None for sample in samples], dtype=torch.bool)
    rewards = {name: values.masked_fill(~left, math.nan) for name, values in rewards.items()}
    reward = torch.full((len(samples),), math.nan, dtype=torch.float64)
    if left.any():
        reward[left] = _combined({name: values[left] for name, values in rewards.items()}, reward_transform_fn)
    return Scores(rewards, reward, _notes(samples, rewards))


def check_examples(reward_functions: Sequence[BaseRewardFunction]) -> None:
    """Run every reward on its own examples; RewardError lists those that do not get the score they promise."""
    problems = []
    for reward_function in reward_functions:
        examples = list(reward_function.examples())
        samples = [_example_sample(index, example) for index, example in enumerate(examples)]
        patience = _Patience(SLOW_AFTER_S, reward_function.score_timeout_s)
        for example, value in zip(examples, _evaluate(reward_function, samples, patience), strict=True):
            if isinstance(value, _Broken):
                problems.append(f"{_shown(example)}: expected {example.score:g}, but {value.reason}")
            elif abs(value - example.score) > EXAMPLE_TOLERANCE:
                got = f"reward {reward_function.name!r} gave {value:g}"
                problems.append(f"{_shown(example)}: expected {example.score:g}, but {got}")
    if problems:
        raise RewardError("Rewards do not hold on their own examples, so training would be blind:\n" + "\n".join(problems))


def _evaluate(
    reward_function: BaseRewardFunction, samples: Sequence[SampleState], patience: _Patience
) -> list[float | _Broken]:
    """A finite score for each sample, or what broke."""
    if not samples:
        return []
    raw = _run(reward_function, samples, patience)
    if isinstance(raw, _Broken):
        return [raw] * len(samples)
    if isinstance(raw, Exception):
        logger.warning("%s on a batch of %d; asking sample by sample.", _raised(reward_function, raw), len(samples))
        raw = [_alone(reward_function, sample, patience) for sample in samples]
    return [_checked(reward_function.name, value) for value in raw]


def _alone(reward_function: BaseRewardFunction, sample: SampleState, patience: _Patience) -> Any:
    if patience.left_s == 0:
        return _late(reward_function, 1, patience)
    raw = _run(reward_function, [sample], patience)
    if isinstance(raw, Exception):
        return _Broken("raised", _raised(reward_function, raw))
    return raw if isinstance(raw, _Broken) else raw[0]


def _run(
    reward_function: BaseRewardFunction, samples: Sequence[SampleState], patience: _Patience
) -> list[Any] | Exception | _Broken:
    """The scores as a list of the right length, what the reward raised, or that it took too long."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(reward_function.score_batch(samples))
        except SystemExit:
            result.append(RuntimeError("it called sys.exit"))
        except BaseException as error:  # noqa: BLE001 - one of the two places: a reward's own code
            result.append(error)

    with _watched(reward_function.name, len(samples), patience.slow_after_s):
        if patience.timeout_s is None:
            call()
        else:
            thread = threading.Thread(target=call, name=f"rl4llm-reward-{reward_function.name}", daemon=True)
            thread.start()
            thread.join(patience.left_s)
    if not result:
        return _late(reward_function, len(samples), patience)
    if isinstance(result[0], RewardError) or _beyond(result[0]):
        raise result[0]
    return result[0] if isinstance(result[0], Exception) else _listed(reward_function.name, result[0], len(samples))


def _beyond(result: Any) -> bool:
    """Whether a reward was interrupted, which concerns the whole program."""
    return isinstance(result, BaseException) and not isinstance(result, Exception)


def _late(reward_function: BaseRewardFunction, num_samples: int, patience: _Patience) -> _Broken:
    late = f"reward {reward_function.name!r} took more than {patience.timeout_s:g} s on {num_samples} samples"
    return _Broken("timeout", late)


def _listed(name: str, scores: Any, expected: int) -> list[Any]:
    if isinstance(scores, Tensor) or type(scores).__module__ == "numpy":
        scores = scores.tolist()
    if not isinstance(scores, list | tuple):
        raise RewardError(
            f"Reward {name!r} returned {_brief(scores)} for {expected} samples. Accepted: a list of {expected} numbers."
        )
    if len(scores) != expected:
        raise RewardError(f"Reward {name!r} returned {len(scores)} scores for {expected} samples; one for each is accepted.")
    return list(scores)


def _checked(name: str, value: Any) -> float | _Broken:
    if isinstance(value, _Broken):
        return value
    if isinstance(value, RewardFailure):
        return _Broken("unavailable", f"reward {name!r} could not be computed: {value}")
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    return _Broken("invalid", f"reward {name!r} returned {_brief(value)}, not a finite number")


def _combined(rewards: dict[str, Tensor], transform: RewardTransform | None) -> Tensor:
    if transform is None:
        if len(rewards) != 1:
            names = ", ".join(rewards)
            raise RewardError(f"{len(rewards)} rewards ({names}) need a reward_transform_fn; see rl4llm.rewards.combine.")
        return next(iter(rewards.values()))
    name = getattr(transform, "__name__", type(transform).__name__)
    shape = next(iter(rewards.values())).shape
    try:
        reward = transform(dict(rewards))
    except RewardError:
        raise
    except Exception as error:  # part of running a reward, and the same for every sample
        raise RewardError(f"reward_transform_fn {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(reward, Tensor) or reward.shape != shape:
        got = f"a tensor of shape {tuple(reward.shape)}" if isinstance(reward, Tensor) else _brief(reward)
        raise RewardError(f"reward_transform_fn {name!r} returned {got}, not a tensor of shape {tuple(shape)}.")
    if not torch.isfinite(reward).all():
        raise RewardError(f"reward_transform_fn {name!r} returned numbers that are not finite: {reward.tolist()!r:.200}.")
    return reward.detach().to("cpu", torch.float64)


@contextlib.contextmanager
def _watched(name: str, num_samples: int, slow_after_s: float) -> Iterator[None]:
    """Say now and then which reward everything is waiting for."""
    done = threading.Event()

    def watch() -> None:
        rounds = 1
        while not done.wait(slow_after_s):
            logger.warning("Reward %r has been running for %g s on %d samples.", name, rounds * slow_after_s, num_samples)
            rounds += 1

    thread = threading.Thread(target=watch, name=f"rl4llm-watch-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _notes(samples: Sequence[SampleState], rewards: Mapping[str, Tensor]) -> dict[str, int]:
    notes = [sample.extras.get("reward_notes", {}) for sample in samples]
    return dict(Counter(f"{name}/{note[name].partition(':')[0]}" for note in notes for name in rewards if name in note))


def _example_sample(index: int, example: Any) -> SampleState:
    sample = SampleState(f"example-{index}", 0, list(example.messages), example.ground_truth, example.columns)
    roles = [message.role for message in example.messages]
    sample.init_msg_size = roles.index("assistant") if "assistant" in roles else len(roles)
    return sample


def _shown(example: Any) -> str:
    return f"{example.messages[-1].content!r:.100} for ground truth {example.ground_truth!r:.100}"


def _raised(reward_function: BaseRewardFunction, error: Exception) -> str:
    wants_main = "main thread" in str(error) and reward_function.score_timeout_s is not None
    hint = " (with score_timeout_s = None it runs in the main thread)" if wants_main else ""
    return f"reward {reward_function.name!r} raised {type(error).__name__}: {str(error)[:500]}{hint}"


def _brief(value: Any) -> str:
    """A value for a message: itself when it is plain and short, else its type."""
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | list | tuple | dict)
    try:
        return f"{value!r:.100}" if plain else f"a {type(value).__name__}"
    except ValueError:  # an integer with more digits than Python prints
        return f"a huge {type(value).__name__}"
