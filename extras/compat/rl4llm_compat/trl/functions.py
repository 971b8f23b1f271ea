"""The reward functions of `trl.rewards`, by what they compute: f(completions, **columns) -> one score for each."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

Completions = Sequence[Any]
Reward = Callable[..., list[float | None]]


def accuracy_reward(completions: Completions, solution: Sequence[str], **columns: Any) -> list[float | None]:
    """Return 1 if math-verify finds the solution in the completion, else 0; None for a solution that it cannot read.

    >>> accuracy_reward([[{"role": "assistant", "content": r"It is \\boxed{1/2}"}]], ["$0.5$"])
    [1.0]
    """
    return [_agrees(_first(said), truth) for said, truth in zip(completions, solution, strict=True)]


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the accuracy of the text after the thoughts; 0 if they do not end."""
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    scores: list[float | None] = []
    for said, truth in zip(map(_first, completions), solution, strict=True):
        end = next((end for end in ends if end in said), None)
        scores.append(0.0 if end is None else _agrees(said.rpartition(end)[2], truth))
    return scores


accuracy_reward.success_at = reasoning_accuracy_reward.success_at = 1.0  # type: ignore[attr-defined] # a function's


def think_format_reward(completions: Completions, **columns: Any) -> list[float | None]:
    """Return 1 for a completion that begins with its only <think> and closes it, else 0."""
    return [
        float(said.startswith("<think>") and said.count("<think>") == 1 and "</think>" in said)
        for said in map(_first, completions)
    ]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Reward:
    """Return the penalty of length: 0 up to max - cache tokens, and -1 at max. Yu et al. 2025 (DAPO), equation 13."""

    def soft_overlong_punishment_reward(
        completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        over = [len(token_ids) - (max_completion_len - soft_punish_cache) for token_ids in completion_ids]
        return [0.0 if n <= 0 else -1.0 if n > soft_punish_cache else -n / soft_punish_cache for n in over]

    return soft_overlong_punishment_reward


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Reward:
    """Return accuracy scaled by length: the best are short if correct, and long if wrong. Yeo et al. 2025, appendix C.1."""

    def cosine_scaled_reward(
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        scores: list[float | None] = []
        right = accuracy_reward(completions, solution)
        for is_right, token_ids in zip(right, completion_ids, strict=True):
            short, long = (
                (max_value_correct, min_value_correct) if is_right else (min_value_wrong, max_value_wrong)
            )
            share = (1 + math.cos(math.pi * min(1.0, len(token_ids) / max_len))) / 2  # 1 for the shortest
            scores.append(None if is_right is None else long + share * (short - long))
        return scores

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Reward:
    """Return the penalty of repeated n-grams of tokens: their share times `max_penalty`. Yeo et al. 2025, appendix C.2."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} is not accepted. Accepted: 0 or below.")

    def repetition_penalty_reward(
        completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        scores: list[float | None] = []
        for token_ids in completion_ids:
            grams = [
                tuple(token_ids[start : start + ngram_size])
                for start in range(len(token_ids) - ngram_size + 1)
            ]
            scores.append((1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0)
        return scores

    return repetition_penalty_reward


def _first(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _agrees(said: str, truth: str) -> float | None:
    import math_verify  # noqa: PLC0415 - takes seconds
    from latex2sympy2_extended import NormalizationConfig  # noqa: PLC0415

    # without its deadlines, which need the main thread, it warns in each call
    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    known = math_verify.parse(truth, parsing_timeout=None)
    if not known:
        return None
    written = math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    found = math_verify.parse(said, [written], extraction_mode="first_match", parsing_timeout=None)
    return float(math_verify.verify(known, found, timeout_seconds=None))
