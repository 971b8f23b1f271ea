"""Boxes, formulas and numbers in a text: which of them are one list, and which number stands alone with its unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rl4llm.rewards.quantities import rewritten, unit

_FORMULA_CHARS = 600
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(\{)|(\d+|\\?[A-Za-z]))")
_LABEL = re.compile(
    r"(\\text\w*\s?\{)?\s*(?:the |final |correct )*answer\s*(?:is\b|[:=])\s*(\})?", re.IGNORECASE
)
_BRACE = re.compile(r"(?<!\\)[{}]")
_BLOCK = r"(?:equation|align|gather|multline|eqnarray|displaymath)\*?"
_FORMULA = re.compile(
    "|".join((
        rf"\$\$(.{{1,{_FORMULA_CHARS}}}?)\$\$",
        rf"(?<![\\$])\$(?!\$)((?=\S)(?:\\\$|[^$]){{0,{_FORMULA_CHARS}}}?(?<![\s\\])"  # $x$; a price ends with white space
        rf"|\s(?:\\\$|[^$]){{1,{_FORMULA_CHARS}}}?\s)\$(?!\d)",  # $ x $
        rf"\\\((.{{1,{_FORMULA_CHARS}}}?)\\\)",
        rf"\\\[(.{{1,{_FORMULA_CHARS}}}?)\\\]",
        rf"\\begin\{{{_BLOCK}\}}(.{{1,{_FORMULA_CHARS}}}?)\\end\{{{_BLOCK}\}}",
    )),
    re.DOTALL,
)  # fmt: skip
_INNER = re.compile(
    r"\\begin\{(?!aligned|split|gathered)(\w+)\}.*?\\end\{\1\}", re.DOTALL
)  # a matrix or the like
_ALIGNED = re.compile(r"\\(?:begin|end)\{(?:aligned|split|gathered)\}")
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
    """Return every ``\\boxed{...}`` in order of their starts, unfinished ones as ""; longer ones cut, but still longer."""
    closing = _closing_braces(text)
    snippets: list[Snippet] = []
    for match in _BOX.finditer(text):
        if match[2]:
            snippets.append(Snippet(match.start(), match.end(), match[2]))
            continue
        start, limit = match.end(), match.end() + max_chars + 1
        end = closing.get(start - 1, limit if limit <= len(text) else start)
        inside = text[start : min(end, limit + 2000)].strip()[: max_chars + 1]
        if label := _LABEL.match(inside):
            inside = ("" if label[2] else label[1] or "") + inside[label.end() :].strip()
        snippets.append(Snippet(match.start(), end + 1, inside))
    return snippets


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


def _content(match: re.Match[str]) -> str:
    """Return what a formula contains; of rows of a derivation the last statement, which a row may continue with "="."""
    inside = next(group for group in match.groups() if group is not None).strip()
    outside = _ALIGNED.sub(
        "", _INNER.sub(lambda inner: inner[0].replace("\\\\", "\0").replace("&", "\1"), inside)
    )
    if "\\\\" in outside or "&" in outside:
        rows = [" ".join(row.split()) for row in outside.replace("&", " ").split("\\\\") if row.strip()] or [
            ""
        ]
        start = max((place for place, row in enumerate(rows) if row[0:1] != "="), default=0)
        inside = " ".join(rows[start:]).replace("\0", "\\\\").replace("\1", "&")
    return inside.rstrip(".,").strip()


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


_SIGNS = "+-\u2212\u2013\u2014\u2010\u2011\uff0d"
_MINUS = f"\\{_SIGNS[1:]}"  # in a set of characters
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)"
NUMBER = (
    rf"(?:[{_MINUS}+] ?)?(?:[$€£¥₹] ?)?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?(?:/\d+)?"
    r"(?: ?%)?[\u00bc-\u00be\u2150-\u215e]?"
)
"""A number with its sign, currency, exponent, denominator or per cent."""

_FRACTION = r"[-+]?\\frac ?(?:\{\d+\}|\d) ?(?:\{\d+\}|\d)"
AMOUNT = re.compile(rf"\d{{1,2}}:\d\d(?: ?[AaPp]\.?[Mm]\b\.?)?|{NUMBER}|{_FRACTION}")
"""A time, a number or a fraction."""

NUMBERS = re.compile(rf"{NUMBER}(?:(?: ?, ?| ?,? and | ?,? or ){NUMBER}){{0,20}}", re.IGNORECASE)
_UNIT_AFTER = re.compile(r"[ -]?(?:[A-Za-z°€¥元]{1,14}(?:\^?[23]|[²³])?(?: per | ?/ ?| of )?[ -]?){1,4}")

BEFORE = {
    "AZYUK2": rf"[\w!.^_{{}}\\/*+=<>()\[\]|~¬√∛∜±∓≠≤≥⌊⌈{_MINUS}]$",
    "of y = 3": rf"[\d+*/=^<>(\u00d7\u00f7√±≤≥≠~{_MINUS}] +$",
    "(x,3)": r"[\w)}\]],$",
    "f(2), 3": r"[\d)}\]], +$",
    "x \\geq 5 there": r"\\[A-Za-z]+ *$",
    "a ratio of 4: 3": r"\d: *$",
    "no more than 3": r"(?:\b(?:not|than|least|most)|n't) +$",
    "1 in 6": r"\d (?:in|to|out of) +$",
    "half of 3": r"\b(?:half|third|quarter|square|cube|root|negative|reciprocal|opposite|power|multiple) of +$",
    "twice 3": r"\b(?:twice|double|triple|times|after|before|root) +$",
    "on Apollo 11": r"[a-z,] [A-Z][\w.-]* +$",
}
"""What stands before a number that is part of other notation, each with a text whose last number therefore is no answer."""

AFTER = {
    "grows as 3_x": r"[\w^_{}\\(\[/*+=<>|]",
    "a 3!-fold": r"!\S",
    "a pair 3,x": r",\S",
    "with 3 + x": rf" ?[*+/^=<>\\(\u00d7\u00f7{_MINUS}] ?[\w\\(]",
    "3 squared": r"[ -](?:squared|cubed|factorial|fold|dozen|thousand|[mb]illion|divided|times|or (?:more|less)|and a)\b",
}
"""What stands behind such a number, each with a text."""

_BEFORE, _AFTER = re.compile("|".join(BEFORE.values())), re.compile("|".join(AFTER.values()))
_OPERAND = re.compile(r"[\d)}\]] *$|(?:^|[^A-Za-z])[A-Za-z] *$")


def last_number(text: str) -> str | None:
    """Return the last number, or list of numbers, with its unit; None if it does not stand alone.

    >>> last_number("costs $1,234.50!"), last_number("It took 3 and 4 hours"), last_number("x^3 grows")
    ('$1,234.50', '3 and 4 hours', None)
    """
    numbers = list(NUMBERS.finditer(text))
    if not numbers:
        return None
    match = numbers[-1]
    after = _UNIT_AFTER.match(text, match.end())
    named = after[0].rstrip() if after else ""
    while named and not unit(f" {rewritten(named)}"):
        named = named.rpartition(" ")[0]
    if not _stands_alone(text, match.start(), match.end() + len(named)):
        return None
    return f"{match[0].strip()} {named.strip()}" if named else match[0].strip()


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a number is no part of other notation, such as a power, a fraction, a pair or an equation."""
    before, after = text[max(0, start - 24) : start], text[end : end + 16]
    if text[start] in _SIGNS and (_OPERAND.search(before) or (text[start + 1] == " " and before.strip())):
        return False
    return _BEFORE.search(before) is None and _AFTER.match(after) is None
