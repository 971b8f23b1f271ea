"""Boxes and formulas in a text, and which of them are one list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_FORMULA_CHARS = 600
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(\\?[A-Za-z0-9]))")
_BRACE = re.compile(r"(?<!\\)[{}]")
_DOLLARS = (
    rf"(?<![\\$])\$(?!\$)((?=\S)(?:\\\$|[^$]){{0,{_FORMULA_CHARS}}}?(?<![\s\\])"  # $x$; a price ends with white space
    rf"|\s(?:\\\$|[^$]){{1,{_FORMULA_CHARS}}}?\s)\$(?!\d)"  # $ x $
)
_FORMULA = re.compile(
    "|".join((
        rf"\$\$(.{{1,{_FORMULA_CHARS}}}?)\$\$",
        _DOLLARS,
        rf"\\\((.{{1,{_FORMULA_CHARS}}}?)\\\)",
        rf"\\\[(.{{1,{_FORMULA_CHARS}}}?)\\\]",
    )),
    re.DOTALL,
)  # fmt: skip
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{3,}[ ,]+){3}")
COMMANDS = re.compile(r"\\(?:begin|end|text\w*|math[a-z]+|mbox|operatorname)\s?\{[^{}]*\}|\\[A-Za-z]+")
"""Commands of LaTeX, with the words that they set."""

_SPACES = r"[\s$,;&~]|\\[()\[\],;:!\\ ]|\\q?quad|\\text\w*\s?\{\s*(?:,|and|or)?\s*\}"
_JOIN = re.compile(rf"(?:{_SPACES}|\b(?:and|or)\b|\b[A-Za-z](?:_\{{?\w{{1,3}}\}}?)?\s*=(?!=))*")
_LINKED = re.compile(r"(?:\\text\w*\s?\{)?[^.:=!?\n]{0,40}\b(?:and|or)\b[^.:=!?\n]{0,20}")
_NO_LINK = re.compile(
    r"\b(?:is|are|was|so|no|not|but|then|thus|hence|that|which|wait|actually|final|answer|therefore|gets?|gives?|since|because"
    r"|simpl\w+|rather|equals?|first|correct\w*)\b",
    re.IGNORECASE,
)


class Snippet(NamedTuple):
    """A box or a formula: where it begins and ends, with its marks, and what it contains."""

    start: int
    end: int
    text: str


def boxes(text: str, max_chars: int) -> list[Snippet]:
    """Return every complete ``\\boxed{...}`` in order of their starts; longer contents come cut, but still longer."""
    closing = _closing_braces(text)
    found: list[Snippet] = []
    for match in _BOX.finditer(text):
        if match[2]:
            found.append(Snippet(match.start(), match.end(), match[2]))
            continue
        start, limit = match.end(), match.end() + max_chars + 1
        end = closing.get(start - 1, limit if limit <= len(text) else start)
        inside = text[start : min(end, limit + 2000)].strip()[: max_chars + 1]
        found.append(Snippet(match.start(), end + 1, inside))
    return [box for box in found if box.text]


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace of each opening brace, if it is closed."""
    opened, closing = [], {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


def formulas(text: str) -> list[Snippet]:
    """Return what stands between dollars or LaTeX's brackets, except prose between two prices.

    >>> [found.text for found in formulas("From $2x = 6$ she gets \\\\(3\\\\), for $5 a piece or $10 for both")]
    ['2x = 6', '3']
    """
    return [
        Snippet(match.start(), match.end(), content)
        for match in _FORMULA.finditer(text)
        if (content := _content(match)) and _PROSE.search(COMMANDS.sub("", content)) is None
    ]


def without_dollars(text: str) -> str:
    """Return the content of a text that is one formula; other text as it is."""
    found = _FORMULA.fullmatch(text)
    return _content(found) if found else text


def leading_formula(text: str) -> str | None:
    """Return the content of the formula that a text begins with, None if it begins with none."""
    found = _FORMULA.match(text)
    return _content(found) if found else None


def _content(match: re.Match[str]) -> str:
    inside = next(group for group in match.groups() if group is not None)
    return inside.strip().rstrip(".,").strip()


def joined(text: str, snippets: Sequence[Snippet]) -> list[str]:
    """Return what snippets contain; those that are one list are joined, without repeats, by commas.

    A list has between its items only commas, "and", "or" and names ("x ="), or a few words with "and" or "or" that are no
    new statement.
    """
    lists: list[list[str]] = [[snippets[0].text]] if snippets else []
    for before, snippet in pairwise(snippets):
        if snippet.start >= before.end and _links(text[before.end : snippet.start]):
            lists[-1].append(snippet.text)
        else:
            lists.append([snippet.text])
    return [", ".join(dict.fromkeys(items)) for items in lists]


def _links(between: str) -> bool:
    if len(between) > 80:
        return False
    return _JOIN.fullmatch(between) is not None or (
        _LINKED.fullmatch(between) is not None and _NO_LINK.search(between) is None
    )
