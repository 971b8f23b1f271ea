"""Check rewards on their own examples before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.errors import RewardError
from rl4llm.core.types import TokenSpan
from rl4llm.rewards.ask import SLOW_AFTER_S, Broken, Patience, ask


def check_examples(reward_functions: Sequence[BaseRewardFunction]) -> None:
    """Run every reward, and those it asks, on its own examples.

    RewardError lists the examples that do not get the score they promise.
    """
    problems = [problem for reward_function in reward_functions for problem in _problems(reward_function)]
    if problems:
        raise RewardError(
            "Rewards do not give the scores that their own examples promise. Fix the reward or its examples:\n"
            + "\n".join(problems)
        )


def _problems(reward_function: BaseRewardFunction) -> Iterator[str]:
    for part in reward_function.parts:
        yield from _problems(part)
    examples = list(reward_function.examples())
    samples = [_example_sample(index, example) for index, example in enumerate(examples)]
    patience = Patience(SLOW_AFTER_S, reward_function.score_timeout_s)
    for example, values in zip(examples, ask(reward_function, samples, patience), strict=True):
        promised = example.score if isinstance(example.score, Sequence) else [example.score]
        shown = f"{example.messages[-1].content!r:.100} for ground truth {example.ground_truth!r:.100}"
        text = f"{shown}: expected {_numbers(promised)}, but"
        if isinstance(values, Broken):
            yield f"{text} {values.reason}"
        elif len(values) != len(promised) or not all(
            abs(value - score) <= example.tolerance for value, score in zip(values, promised, strict=True)
        ):
            yield f"{text} reward {reward_function.name!r} gave {_numbers(values)}"


def _numbers(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:g}" for score in scores)


def _example_sample(index: int, example: RewardExample) -> SampleState:
    sample = SampleState(f"example-{index}", 0, list(example.messages), example.ground_truth, example.columns)
    roles = [message.role for message in example.messages]
    sample.init_msg_size = roles.index("assistant") if "assistant" in roles else len(roles)
    if example.token_ids:
        tokens = tuple(example.token_ids)
        sample.spans.append(TokenSpan(tokens, "policy", (0.0,) * len(tokens), 0))
    return sample
