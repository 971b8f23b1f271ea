"""Read the ground truth of a row of mathematics: the answers that it accepts, without the solution around them."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.rewards.conclusion import only_mathematics
from rl4llm.rewards.extract import boxed_answers, final_answer

MAX_CHARS = 4000
MAX_WORDS = 8
_WRAPPED = re.compile(r"\\[a-z]+\s?\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_NUMBERED = re.compile(r"(?:^|[;,.\s])\(?1[).]\s.*[;,.\s]\(?2[).]\s", re.DOTALL)
_ACCEPTED = (
    f"Accepted: an answer of 1 to {MAX_CHARS} characters, a number, a solution with a \\boxed{{answer}} or a line "
    "'#### answer', or a list of accepted answers. Next: set data.answer_column to the column of the answer, or "
    "data.answer_pattern to what finds it."
)


def accepted_answers(ground_truth: Any) -> list[str]:
    r"""Return each answer that a ground truth accepts; raises DataError for one that is no answer.

    >>> accepted_answers("9 * 2 = 18\n#### 18"), accepted_answers("$x = \\boxed{1}$ or \\boxed{2}"), accepted_answers([0.5])
    (['18'], ['1, 2'], ['0.5'])
    """
    several = isinstance(ground_truth, list | tuple) and len(ground_truth) > 0
    return [_answer(item) for item in (ground_truth if several else [ground_truth])]


def _answer(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise DataError(f"ground_truth={item!r:.200} is not an answer. {_ACCEPTED}")
    if isinstance(item, float):
        if not math.isfinite(item):
            raise DataError(f"ground_truth={item} is not an answer. {_ACCEPTED}")
        item = f"{Decimal(repr(item)):f}"
    text = _without_solution(str(item))
    if not 1 <= len(text) <= MAX_CHARS:
        raise DataError(f"ground_truth={item!r:.200} is not an answer. {_ACCEPTED}")
    if text.lower() in ("nan", "null"):
        raise DataError(f"ground_truth={item!r} is not an answer but a missing value. {_ACCEPTED}")
    if _NUMBERED.search(text):
        raise DataError(
            f"ground_truth={item!r:.200} has numbered parts, which no single answer equals. Make one row of each part, or "
            "remove the row."
        )
    if len(_words(text)) >= MAX_WORDS:
        raise DataError(f"ground_truth={item!r:.200} is a sentence, not an answer. {_ACCEPTED}")
    return text


def _without_solution(text: str) -> str:
    _, marked, rest = text.rpartition("####")
    if marked:
        return rest.strip()
    boxes = boxed_answers(text, MAX_CHARS)
    if boxes:
        return boxes[-1].strip()
    announced = final_answer(text, "answer", MAX_CHARS) if len(_words(text)) >= MAX_WORDS else None
    return (announced or only_mathematics(text) or text).strip()


def _words(text: str) -> list[str]:
    return _WORD.findall(_WRAPPED.sub(" ", text))
