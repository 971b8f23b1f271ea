"""All rewards over finished samples, where a fault concerns one sample only, and over their own examples."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, RewardTransform, SampleState
from rl4llm.core.base_reward import as_sample
from rl4llm.core.errors import RewardError
from rl4llm.core.types import TokenSpan
from rl4llm.rewards.ask import SLOW_AFTER_S, Broken, Patience, ask
from rl4llm.runtime.raised import raised

_turns: dict[int, threading.Lock] = {}  # by the id of a reward, which rollouts may share, while it exists


@dataclass(frozen=True, slots=True)
class Scores:
    """What N samples earned, float64 tensors of shape (N,), NaN where a sample failed."""

    rewards: Mapping[str, Tensor]
    reward: Tensor


def score(
    samples: Sequence[SampleState],
    reward_functions: Sequence[BaseRewardFunction],
    reward_transform_fn: RewardTransform | None = None,
    *,
    timeout_s: float | None = None,
    slow_after_s: float = SLOW_AFTER_S,
) -> Scores:
    """Run every reward over the samples that have not failed, and combine what they earned; see `earn` and `combine`."""
    earn(samples, reward_functions, timeout_s=timeout_s, slow_after_s=slow_after_s)
    return combine(samples, reward_functions, reward_transform_fn)


def earn(
    samples: Sequence[SampleState],
    reward_functions: Sequence[BaseRewardFunction],
    *,
    timeout_s: float | None = None,
    slow_after_s: float = SLOW_AFTER_S,
) -> None:
    """Run every reward over the samples that have not failed, and note what each earned in its `rewards`.

    A reward that raises on the batch, or for a sample, runs once more on each sample alone, so that only samples that it
    cannot score fail. A sample also fails if its score is not a finite number. Rewards of turns go to the samples'
    `turn_rewards`, their sum to `rewards`. A reward that runs longer than `slow_after_s` is logged at intervals. If it
    exceeds its `score_timeout_s`, or `timeout_s` if given, the samples that it has not scored fail. For that it runs in a
    separate thread. A reward that needs the main thread, such as one that sets signals, has no time limit.

    Raises RewardError, which stops the run, if a reward breaks its contract for the whole batch: a wrong number of scores,
    or a result that is not a list.
    """
    earned_by_turns: list[list[Sequence[float]]] = [[] for _ in samples]
    names = [name for reward_function in reward_functions for name in reward_function.score_names]
    rewards = [dict.fromkeys(names, math.nan) for _ in samples]
    for reward_function in reward_functions:
        scorable = [index for index, sample in enumerate(samples) if sample.failure is None]
        with _turn_of(reward_function):
            patience = Patience(
                slow_after_s, reward_function.score_timeout_s if timeout_s is None else timeout_s
            )
            values = ask(reward_function, [samples[index] for index in scorable], patience)
        for index, value in zip(scorable, values, strict=True):
            if isinstance(value, Broken):
                samples[index].fail(value.reason, f"{reward_function.name}/{value.kind}")
            else:
                numbers = (sum(value), *reward_function.subscores_of(samples[index]))
                rewards[index] |= zip(reward_function.score_names, numbers, strict=True)
                earned_by_turns[index].append(value if reward_function.per_turn else ())
    for sample, earned, turns in zip(samples, rewards, earned_by_turns, strict=True):
        sample.rewards = earned
        for scores in turns if sample.failure is None else ():  # one of the rewards may have failed it
            for turn, number in enumerate(scores):
                sample.turn_rewards[turn] = sample.turn_rewards.get(turn, 0.0) + number


def _turn_of(reward_function: BaseRewardFunction) -> threading.Lock:
    """Return the lock of a reward, which is not an attribute of it, so that it can still be copied and pickled."""
    if id(reward_function) not in _turns:
        weakref.finalize(reward_function, _turns.pop, id(reward_function), None)
    return _turns.setdefault(id(reward_function), threading.Lock())


def combine(
    samples: Sequence[SampleState],
    reward_functions: Sequence[BaseRewardFunction],
    reward_transform_fn: RewardTransform | None = None,
) -> Scores:
    """Return what samples that have their `rewards` earned. `reward_transform_fn` gets the terminal rewards of those that
    have not failed, (num_samples,). Raises RewardError if its result is not (num_samples,) finite numbers."""
    scored = torch.tensor([sample.failure is None for sample in samples], dtype=torch.bool)
    rewards: dict[str, Tensor] = {}
    for name in (name for item in reward_functions for name in item.score_names):
        values = torch.tensor([(sample.rewards or {})[name] for sample in samples], dtype=torch.float64)
        rewards[name] = values.masked_fill(~scored, math.nan)
    reward = torch.full((len(samples),), math.nan, dtype=torch.float64)
    if scored.any():
        terminal = {item.name: rewards[item.name][scored] for item in reward_functions if not item.per_turn}
        reward[scored] = _combined(terminal, reward_transform_fn, int(scored.sum()))
    return Scores(rewards, reward)


def successes(
    reward_functions: Sequence[BaseRewardFunction],
    rewards: Mapping[str, float],
    *,
    reward: float,
    success_at: float | None = None,
) -> dict[str, bool]:
    """Return, for each reward that defines success, whether an episode reached it.

    If none does, `success_at` of the environment, if any, is compared with the episode's total `reward`.
    """
    least = {item.name: item.success_at for item in reward_functions if item.success_at is not None}
    if not least:
        return {} if success_at is None else {"": reward >= success_at}
    return {name: rewards[name] >= score for name, score in least.items()}


def _combined(rewards: dict[str, Tensor], transform: RewardTransform | None, num_samples: int) -> Tensor:
    if not rewards:
        return torch.zeros(num_samples, dtype=torch.float64)
    if transform is None:
        if len(rewards) != 1:
            raise RewardError(
                f"The rewards {', '.join(rewards)} need a reward_transform_fn; see rl4llm.rewards.combine."
            )
        return next(iter(rewards.values()))
    name = getattr(transform, "__name__", type(transform).__name__)
    shape = next(iter(rewards.values())).shape
    try:
        reward = transform(dict(rewards))
    except RewardError:
        raise
    except Exception as error:  # part of running a reward, and the same for every sample
        raise RewardError(raised(f"reward_transform_fn {name!r}", error)) from error
    if not (isinstance(reward, Tensor) and reward.shape == shape and torch.isfinite(reward).all()):
        accepted = f"a tensor of shape {tuple(shape)} with finite numbers"
        raise RewardError(f"reward_transform_fn {name!r} returned {reward!r:.200}. Accepted: {accepted}.")
    return reward.detach().to("cpu", torch.float64)


def check_examples(reward_functions: Sequence[BaseRewardFunction]) -> None:
    """Run every reward, and those it asks, on its own examples.

    RewardError lists the examples that do not get the score they promise.
    """
    lines = [line for reward_function in reward_functions for line in _misses(reward_function)]
    if lines:
        raise RewardError(
            "\n".join(["Rewards do not give the scores that their own examples promise:", *lines])
        )


def _misses(reward_function: BaseRewardFunction) -> Iterator[str]:
    for part in reward_function.parts:
        yield from _misses(part)
    examples = list(reward_function.examples())
    samples = [_example_sample(index, example) for index, example in enumerate(examples)]
    patience = Patience(SLOW_AFTER_S, reward_function.score_timeout_s)
    for example, values in zip(examples, ask(reward_function, samples, patience), strict=True):
        promised = example.score if isinstance(example.score, Sequence) else [example.score]
        case = f"{example.messages[-1].content!r:.100} for ground truth {example.ground_truth!r:.100}"
        text = f"{case}: expected {_numbers(promised)}, but"
        if isinstance(values, Broken):
            yield f"{text} {values.reason}"
        elif len(values) != len(promised) or not all(
            abs(value - score) <= example.tolerance for value, score in zip(values, promised, strict=True)
        ):
            yield f"{text} reward {reward_function.name!r} gave {_numbers(values)}"


def _numbers(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:g}" for score in scores)


def _example_sample(index: int, example: RewardExample) -> SampleState:
    sample = as_sample(example.messages, example.ground_truth, example.columns)
    sample.prompt_id = f"example-{index}"
    if example.token_ids:
        tokens = tuple(example.token_ids)
        sample.spans.append(TokenSpan(tokens, "policy", (0.0,) * len(tokens), 0))
    return sample
