"""Compare answers by strings and exact fractions, in the trainer's process.

Most answers are numbers or words and are decided here in microseconds. Undecided ones (None) go to computer algebra in a
worker process. Only short strings are examined, with patterns that cannot backtrack far.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 120
MAX_TIDY_CHARS = 500
MAX_DIGITS = 50
DECIMALS_FOR_EQUALITY = 6

_REPLACE = {
    **dict.fromkeys(("\\left", "\\right", "\\!", "\\,", "\\displaystyle", "\u200b"), ""),
    **dict.fromkeys(("\\ ", "~", "\xa0", "\\;", "\\:", "\\quad"), " "),
    **dict.fromkeys(("^{\\circ}", "^\\circ", "\\degree", "°"), ""),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    "\u2212": "-",
    "{,}": ",",
    "{:}": ":",
    "\\varnothing": "\\emptyset",
    "\\%": "%",
    "\\$": "$",
}
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s?\{([^{}]*)\}"
_WRAPPER = re.compile(_TEXT)
_WRAPPED_WORDS = re.compile(rf"\(?{_TEXT}\)?[.,]?")
_PLAIN_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|(?i:yes|no|odd|all|both)")
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_PLAIN = re.compile(rf"([+-]?)[$€£]?([+-]?)({_WHOLE}(?:\.\d*)?|\.\d+)(?:\s?(%|percent\b))?(.*)", re.ASCII)
_FRACTION = re.compile(r"([+-]?)\\frac ?(?:\{(-?\d+)\}|(\d)) ?(?:\{(-?\d+)\}|(\d))(.*)", re.ASCII)
_SLASH = re.compile(rf"([+-]?)[$€£]?({_WHOLE})/({_WHOLE})(.*)", re.ASCII)
_UNIT = re.compile(
    r"(?:[ /](?:[A-Za-z]{3,20}|cm|mm|km|kg|mg|ml|ft|in|lb|hr|mi|yd|oz|sq|of|gm)\.?){1,6}(?: ?\^\{?[23]\}?)?"
)
_NO_UNIT = {
    "and", "not", "but", "plus", "minus", "times", "over", "mod", "squared", "cubed", "sin", "cos", "tan", "cot",
    "sec", "csc", "log", "exp", "sqrt", "hundred", "thousand", "million", "billion", "trillion", "dozen", "half",
    "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths",
    "seventh", "sevenths", "eighth", "eighths", "ninth", "ninths", "tenth", "tenths", "hundredth", "hundredths",
    "factorial",
}  # fmt: skip
_IN_BASE = re.compile(r"\(?([+-]?\d[0-9A-Z.]*)\)?_\{?(\d{1,3})\}?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; `decimals` counts the digits written after the point, -1 for a fraction."""

    value: Fraction
    percent: bool = False
    decimals: int = -1


def same(gold: str, answer: str) -> bool | None:
    """Return whether two answers are equal; None if strings and numbers cannot decide.

    >>> same("1,234", "$1234.00"), same("1/2", "0.5"), same("50%", "50"), same("18", "19"), same("x+1", "1+x")
    (True, True, True, False, None)

    A percentage equals its number and its hundredth. A decimal equals a fraction when it is that fraction rounded to at
    least six places. Units after a number do not count. A number in another base equals itself without the base.
    """
    wanted, given = _tidy(gold), _tidy(answer)
    if wanted.text and wanted.text == given.text:
        return True
    wanted_number, given_number = _number(wanted.text), _number(given.text)
    if wanted_number and given_number:
        return _same_number(wanted_number, given_number)
    if wanted.words:
        return _words(wanted.text) == _words(given.text)
    if "=" in given.text and "=" not in wanted.text and _is_equation(given.text):
        return False
    return _same_in_base(wanted.text, given.text, wanted_number)


def number(text: str) -> Number | None:
    """Return the number in a short text, with or without currency, separators, percent sign and unit."""
    return _number(_tidy(text).text)


@dataclass(frozen=True, slots=True)
class _Tidy:
    """An answer without markup that changes nothing. `words`: it is text rather than mathematics.

    Computer algebra reads "west" as w*e*s*t, which equals "stew": text in a text command, plain words of four letters or
    more, and a few short ones that answer questions are compared as text.
    """

    text: str
    words: bool


def _tidy(text: str) -> _Tidy:
    text = text.strip()
    if len(text) > MAX_TIDY_CHARS:
        return _Tidy(text, False)
    for markup, plain in _REPLACE.items():
        text = text.replace(markup, plain)
    wrapped = _WRAPPED_WORDS.fullmatch(text.strip()) is not None
    text = re.sub(r"\s+", " ", _WRAPPER.sub(r" \1 ", text))
    text = re.sub(r" ?([-,+=()\[\]{}*/^]) ?", r"\1", text).strip().removesuffix(".").strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return _Tidy(text, wrapped or _PLAIN_WORDS.fullmatch(text) is not None)


def _words(text: str) -> str:
    return re.sub(r"[\s,;()*\"'!]+", " ", text.lower().replace(".", "")).strip()


def _number(text: str) -> Number | None:
    if not text or len(text) > MAX_NUMBER_CHARS or sum(char.isdigit() for char in text) > MAX_DIGITS:
        return None
    return _plain(text) or _fraction(text)


def _plain(text: str) -> Number | None:
    match = _PLAIN.fullmatch(text)
    if not match or (match[1] and match[2]) or not _is_unit(match[5]):
        return None
    whole, _, decimals = match[3].replace(",", "").partition(".")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    return Number(-value if "-" in match[1] + match[2] else value, match[4] is not None, len(decimals))


def _fraction(text: str) -> Number | None:
    if match := _FRACTION.fullmatch(text):
        above, below, rest = match[2] or match[3], match[4] or match[5], match[6]
    elif match := _SLASH.fullmatch(text):
        above, below, rest = match[2].replace(",", ""), match[3].replace(",", ""), match[4]
    else:
        return None
    if int(below) == 0 or not _is_unit(rest):
        return None
    value = Fraction(int(above), int(below))
    return Number(-value if match[1] == "-" else value)


def _is_unit(rest: str) -> bool:
    """Return whether the text after a number is only a unit; "5 million", "3 and" and "2xy" mean more."""
    if not rest:
        return True
    words = re.findall(r"[a-z]+", rest.lower())
    return _UNIT.fullmatch(rest) is not None and _NO_UNIT.isdisjoint(words)


def _same_number(gold: Number, answer: Number) -> bool:
    if gold.percent == answer.percent:
        return _close(gold, answer)
    percentage, plain = (gold, answer) if gold.percent else (answer, gold)
    hundredth = Number(percentage.value / 100, decimals=percentage.decimals)
    return _close(percentage, plain) or _close(hundredth, plain)


def _close(one: Number, other: Number) -> bool:
    if one.value == other.value:
        return True
    if (one.decimals < 0) == (other.decimals < 0):
        return False
    decimal, fraction = (one, other) if other.decimals < 0 else (other, one)
    return (
        decimal.decimals >= DECIMALS_FOR_EQUALITY and round(fraction.value, decimal.decimals) == decimal.value
    )


def _is_equation(text: str) -> bool:
    """Return whether the left side of the last "=" is more than a name: computer algebra takes "2x-18=0" for 0."""
    left = re.sub(r"\\[A-Za-z]+|_\{?\w*\}?", "", text.rpartition("=")[0])
    return re.search(r"[A-Za-z][-+*/^]|[-+*/^]\d*[A-Za-z]|\d[A-Za-z]", left) is not None


def _same_in_base(gold: str, answer: str, gold_number: Number | None) -> bool | None:
    """Compare numbers in a base as written: computer algebra drops the subscript of 413_5."""
    gold_base, answer_base = _IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer)
    if gold_base is None:
        return False if answer_base and gold_number else None
    if answer_base is None:
        return answer == gold_base[1]
    return gold_base.groups() == answer_base.groups()
