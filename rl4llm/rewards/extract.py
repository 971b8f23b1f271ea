"""Find the final answer in a reply.

It only searches bounded pieces, because it runs in the trainer's process on text that may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from rl4llm.core.message import after_thinking
from rl4llm.rewards.conclusion import concluded, first_sentence, is_equation
from rl4llm.rewards.marks import boxes, joined, last_number, leading_formula

Extraction = Literal["auto", "tag", "boxed", "hash", "answer", "last_number"]

_SEARCHED_CHARS = 20_000
_HEADING = re.compile(
    r"\W*(?:(?:step|case|part|question|problem|method|approach)\b.*|\d+[.)] .*[A-Za-z]{2}.*"
    r"|(?:(?:the|final) )*(?:answer|result|solution|explanation|conclusion|summary|verification|check)\W*)",
    re.IGNORECASE,
)
_LINE_CHARS, _SIDE_CHARS = 1000, 200
_MINUS = re.compile(r"\b(?:minus|negative) (?=[$\d\\])", re.IGNORECASE)
_ANNOUNCED = re.compile(r"s?[*_\s]*(?:(?:is|are|was)\b|[:=])[*_\s:]*")


def final_answer(text: str, extraction: Extraction = "auto", max_chars: int = 400) -> str | None:
    """Return the model's final answer, None if it has none.

    "tag" is the last ``<answer>...</answer>``, "boxed" the last ``\\boxed{...}``, or the last few that are one list, "hash"
    the rest of the line after the last ``####``, unless that is a heading, "answer" what follows the last "answer is" or
    "Answer:", "last_number" the last number that stands alone, or that arithmetic or a name equals. "auto" takes the first
    of the first four that is there, else what the last sentences conclude with: a formula, the words after the verb, or a
    number that stands alone. A number inside other notation is never taken out of it. Thoughts hold no answer. An answer
    longer than `max_chars` comes cut, but still longer than that.
    """
    text = _MINUS.sub("-", after_thinking(text)[-_SEARCHED_CHARS:])
    extractors = _AUTO if extraction == "auto" else (_EXTRACTORS[extraction],)
    found = (extractor(text, max_chars) for extractor in extractors)
    return next((answer for answer in found if answer is not None), None)


def boxed_answers(text: str, max_chars: int = 400) -> list[str]:
    r"""Return the boxed answers near the end of `text`, in order. Boxes that only "and", "or", commas or names part are one.

    >>> boxed_answers("\\boxed{5}, so $x = \\boxed{1}$ and $x = \\boxed{-2}$")
    ['5', '1, -2']
    """
    text = text[-_SEARCHED_CHARS:]
    return joined(text, boxes(text, max_chars))


def _tag(text: str, max_chars: int) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    inside = text[start + len("<answer>") : end].strip()
    return _of_part(inside, max_chars) or inside[: max(_LINE_CHARS, max_chars + 1)] or None


def _boxed(text: str, max_chars: int) -> str | None:
    return next(reversed(boxed_answers(text, max_chars)), None)


def _hash(text: str, max_chars: int) -> str | None:
    """Return what the last mark announces, unless that is the heading of what stands below it."""
    _, mark, rest = text.rpartition("####")
    line, _, below = rest.strip().partition("\n")
    heading = below.strip() and _HEADING.fullmatch(line)
    return None if heading or not mark else _first_line(rest.lstrip(" \t*:"), max_chars)


def _answer(text: str, max_chars: int) -> str | None:
    """Return what the last "answer" announces; the bare word, as in "to answer this", announces nothing."""
    ends = [match.end() for match in re.finditer("answer", text, re.IGNORECASE)]
    for end in reversed(ends):
        if announced := _ANNOUNCED.match(text, end):
            return _first_line(text[announced.end() :], max_chars)
    return None


def _first_line(text: str, max_chars: int) -> str | None:
    """Return what the first line concludes with, else its first sentence; None when it is empty."""
    text = text[: max(_LINE_CHARS, max_chars + 1)].strip()
    line = text.partition("\n")[0]
    if line.strip() in ("$", "$$", "\\(", "\\["):  # a formula over several lines
        return leading_formula(text)
    first = first_sentence(line)
    return _of_part(first, max_chars) or first.strip(" *_`").removesuffix(".").strip(" *_`") or None


def _last_number(text: str, max_chars: int) -> str | None:
    """Return the last number that stands alone, or equals arithmetic or a name: 19 in "12 + 7 = 19", not 18 in "2x = 18"."""
    text = text[-_LINE_CHARS:]
    left, equals, right = text.rpartition("=")
    result = equals and left[-1:] not in tuple("<>!=:") and not is_equation(left[-_SIDE_CHARS:])
    return (last_number(right) if result else None) or last_number(text)


def _of_part(text: str, max_chars: int) -> str | None:
    return _boxed(text, max_chars) or concluded(text)


_EXTRACTORS: dict[str, Callable[[str, int], str | None]] = {
    "tag": _tag,
    "boxed": _boxed,
    "hash": _hash,
    "answer": _answer,
    "last_number": _last_number,
}
_AUTO = (_tag, _boxed, _hash, _answer, lambda text, max_chars: concluded(text))
