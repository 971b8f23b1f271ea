"""The final answer in what a model wrote.

Plain searches on bounded pieces: this runs in the trainer's process, on text that may be hostile.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Extraction = Literal["auto", "boxed", "hash", "answer", "last_number"]
EXTRACTIONS: tuple[str, ...] = get_args(Extraction)

_SEARCHED_CHARS = 20_000
_LINE_CHARS = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?", re.ASCII)
_ANNOUNCED = re.compile(r"s?[*_\s]*(?:(?:is|are|was)\b|[:=])[*_\s:]*")
_REASON = re.compile(r",? (?:because|since)\b|, (?:as|so|which)\b", re.IGNORECASE)
_MATH_MARKS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def final_answer(text: str, extraction: Extraction = "auto", max_chars: int = 400) -> str | None:
    """The model's final answer, None when there is none.

    "boxed" is the last ``\\boxed{...}``, "hash" the rest of the line after the last ``####``, "answer" what follows the
    last "answer is" or "Answer:", "last_number" the last number. "auto" takes the first of these four that is there.
    Reasoning up to ``</think>`` is skipped; reasoning that never ended holds no answer. An answer longer than `max_chars`
    comes cut, but still longer than that.
    """
    text = after_thinking(text)[-_SEARCHED_CHARS:]
    extractors = _EXTRACTORS.values() if extraction == "auto" else [_EXTRACTORS[extraction]]
    found = (extractor(text, max_chars) for extractor in extractors)
    return next((answer for answer in found if answer is not None), None)


def after_thinking(text: str) -> str:
    """The part after the last ``</think>``; all of it when nothing was thought; "" when thinking never ended."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def boxed_answers(text: str, max_chars: int = 400) -> list[str]:
    """The content of every complete ``\\boxed{...}`` near the end of `text`, in order of their starts."""
    text = text[-_SEARCHED_CHARS:]
    starts = [match.end() for match in _BOX.finditer(text)]
    boxes = [text[start : _closing_brace(text, start, start + max_chars + 1)] for start in starts]
    return [box for box in boxes if box.strip()]


def _closing_brace(text: str, start: int, limit: int) -> int:
    """Where the brace that is open at `start` closes; `limit` when that is further away, `start` when it never does."""
    depth = 1
    for index in range(start, min(limit, len(text))):
        if text[index - 1] != "\\":
            depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return limit if limit <= len(text) else start


def _boxed(text: str, max_chars: int) -> str | None:
    return next(reversed(boxed_answers(text, max_chars)), None)


def _hash(text: str, max_chars: int) -> str | None:
    _, mark, rest = text.rpartition("####")
    return _first_line(rest.lstrip(" \t*:"), max_chars) if mark else None


def _answer(text: str, max_chars: int) -> str | None:
    """What the last "answer" announces; the bare word, as in "to answer this", announces nothing."""
    ends = [match.end() for match in re.finditer("answer", text, re.IGNORECASE)]
    for end in reversed(ends):
        if announced := _ANNOUNCED.match(text, end):
            return _first_line(text[announced.end() :], max_chars)
    return None


def _last_number(text: str, max_chars: int) -> str | None:
    return next(reversed(_NUMBER.findall(text)), None)


def _first_line(text: str, max_chars: int) -> str | None:
    """The first line, without a second sentence, a reason, and markup around it; None when it is empty."""
    line = text[: max(_LINE_CHARS, max_chars + 1)].strip().partition("\n")[0]
    line = _REASON.split(line.partition(". ")[0], maxsplit=1)[0].strip(" *_`").removesuffix(".").strip(" *_`")
    for left, right in _MATH_MARKS:
        inside, closed, rest = line.removeprefix(left).partition(right)
        if line.startswith(left) and closed and not re.search(r"[\d$\\]", rest):
            return inside.strip() or None
    return line or None


_EXTRACTORS = {"boxed": _boxed, "hash": _hash, "answer": _answer, "last_number": _last_number}
