"""Extract the final answer from a reply.

It only searches bounded pieces, because it runs in the trainer's process on text that may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Extraction = Literal["auto", "boxed", "hash", "answer", "last_number"]

_SEARCHED_CHARS = 20_000
_LINE_CHARS = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?", re.ASCII)
_ANNOUNCED = re.compile(r"s?[*_\s]*(?:(?:is|are|was)\b|[:=])[*_\s:]*")
_REASON = re.compile(r",? (?:because|since)\b|, (?:as|so|which)\b", re.IGNORECASE)
_MATH_MARKS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def final_answer(text: str, extraction: Extraction = "auto", max_chars: int = 400) -> str | None:
    """Return the model's final answer, None if it has none.

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
    """Return the part after the last ``</think>``: all of a text without thoughts, "" if the thought never ended."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def boxed_answers(text: str, max_chars: int = 400) -> list[str]:
    """Return the content of every complete ``\\boxed{...}`` near the end of `text`, in order of their starts."""
    text = text[-_SEARCHED_CHARS:]
    closing = _closing_braces(text)
    boxes = []
    for match in _BOX.finditer(text):
        start, limit = match.end(), match.end() + max_chars + 1
        end = closing.get(start - 1, limit if limit <= len(text) else start)
        boxes.append(text[start : min(end, limit)])
    return [box for box in boxes if box.strip()]


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace of each opening brace, if it is closed."""
    opened, closing = [], {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


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


def _first_line(text: str, max_chars: int) -> str | None:
    """The first line, without a second sentence, a reason, and markup around it; None when it is empty."""
    line = text[: max(_LINE_CHARS, max_chars + 1)].strip().partition("\n")[0]
    line = _REASON.split(line.partition(". ")[0], maxsplit=1)[0].strip(" *_`").removesuffix(".").strip(" *_`")
    for left, right in _MATH_MARKS:
        inside, closed, rest = line.removeprefix(left).partition(right)
        if line.startswith(left) and closed and not re.search(r"[\d$\\]", rest):
            return inside.strip() or None
    return line or None


_EXTRACTORS: dict[str, Callable[[str, int], str | None]] = {
    "boxed": lambda text, max_chars: next(reversed(boxed_answers(text, max_chars)), None),
    "hash": _hash,
    "answer": _answer,
    "last_number": lambda text, max_chars: next(reversed(_NUMBER.findall(text)), None),
}
