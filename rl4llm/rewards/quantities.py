"""Read numbers as they are written in answers, and compare them exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rl4llm.rewards.units import Unit, agree, unit

MAX_NUMBER_CHARS = 120
MAX_DIGITS = 50
MAX_EXPONENT = 400
SIGNIFICANT_DIGITS = 6

_WHOLE = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_POWER = r"10 ?\^ ?(?:\{ ?([+-]?\d{1,3}) ?\}|(\d))"
_SIGN = r"([+-]?) ?"
_CURRENCY = r"([$€£¥₹]?) ?"
_FRAC = r"\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(-?\d+) ?\}|(\d))"
_FORMS = {
    "decimal": re.compile(
        rf"{_SIGN}{_CURRENCY}{_SIGN}({_DECIMAL})(?:[eE]([+-]?\d{{1,3}})| ?(?:\\times|\\cdot|\*) ?{_POWER})?"
        r"(?![\d^_]|,\d|\.\d)(.*)",
        re.ASCII,
    ),
    "power": re.compile(rf"{_SIGN}{_POWER}(?![\d^_])(.*)", re.ASCII),
    "frac": re.compile(rf"{_SIGN}{_CURRENCY}(\d{{0,20}}) ?{_FRAC}(?![\d^_])(.*)", re.ASCII),
    "slash": re.compile(rf"{_SIGN}{_CURRENCY}(?:(\d{{1,20}}) )?({_WHOLE}) ?/ ?({_WHOLE})(?![\d^_.,])(.*)", re.ASCII),
}  # fmt: skip
_PERCENT = re.compile(r" ?(?:%|(?:percent|per cent)\b)(?:age points?| points?)?")
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf" ?({'|'.join(_LARGE)})\b")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value. `decimals` counts the digits written after the point, -1 for a fraction."""

    value: Fraction
    percent: bool = False
    decimals: int = -1
    unit: Unit = ()


def number(text: str) -> Number | None:
    r"""Return the number in a short rewritten text, with or without currency, percent sign and unit.

    >>> number("1,234.50").value, number("3e2").value, number("1\\frac{1}{2}").value, number("2 million").value
    (Fraction(2469, 2), Fraction(300, 1), Fraction(3, 2), Fraction(2000000, 1))
    """
    if not text or len(text) > MAX_NUMBER_CHARS or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    for read in (_fraction, _power, _decimal):
        if (found := read(text)) is not None:
            return found
    return None


def equal(gold: Number, answer: Number) -> bool:
    """Return whether two numbers are equal, of no different units, and both percentages or neither.

    A percent sign may be missing from the answer: 50% is 0.5 and 50. One that the ground truth lacks makes the answer a
    hundredth, except for a ground truth above 1, where 50% is 50 too: 0.5% is not 0.5, and 1% is not 1.
    """
    if not agree(gold.unit, answer.unit):
        return False
    if gold.percent == answer.percent:
        return _close(gold, answer)
    percentage, plain = (gold, answer) if gold.percent else (answer, gold)
    hundredth = Number(
        percentage.value / 100, decimals=percentage.decimals + 2 if percentage.decimals >= 0 else -1
    )
    bare = gold.percent or abs(gold.value) > 1
    return _close(hundredth, plain) or (bare and _close(percentage, plain))


def _close(one: Number, other: Number) -> bool:
    """Return whether two values are equal, or one is the other, a fraction, rounded to at least six decimals and digits."""
    if one.value == other.value:
        return True
    if (one.decimals < 0) == (other.decimals < 0):
        return False
    decimal, fraction = (one, other) if other.decimals < 0 else (other, one)
    rounded = (
        decimal.decimals >= SIGNIFICANT_DIGITS and round(fraction.value, decimal.decimals) == decimal.value
    )
    return rounded and abs(decimal.value - fraction.value) * 10 ** (SIGNIFICANT_DIGITS - 1) <= abs(
        fraction.value
    )


def _decimal(text: str) -> Number | None:
    match = _FORMS["decimal"].fullmatch(text)
    if match is None or (match[1] and match[3]):
        return None
    sign, (whole, _, decimals) = match[1] + match[3], match[4].replace(",", "").partition(".")
    exponent = int(match[5] or match[6] or match[7] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * Fraction(10) ** exponent
    exact = match[5] is not None or match[6] is not None or match[7] is not None
    return _with_rest(-value if sign == "-" else value, -1 if exact else len(decimals), match[2], match[8])


def _power(text: str) -> Number | None:
    match = _FORMS["power"].fullmatch(text)
    exponent = int(match[2] or match[3]) if match else MAX_EXPONENT + 1
    if match is None or abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(10) ** exponent
    return _with_rest(-value if match[1] == "-" else value, -1, "", match[4])


def _fraction(text: str) -> Number | None:
    if match := _FORMS["frac"].fullmatch(text):
        above, below, rest = match[4] or match[5], match[6] or match[7], match[8]
    elif match := _FORMS["slash"].fullmatch(text):
        above, below, rest = match[4].replace(",", ""), match[5].replace(",", ""), match[6]
    else:
        return None
    if int(below) == 0 or (match[3] and (int(above) < 0 or int(below) <= int(above))):
        return None  # a mixed number has a fraction below one: 2 3/2 and 2\frac{-1}{2} are none
    value = int(match[3] or 0) + Fraction(int(above), int(below))
    return _with_rest(-value if match[1] == "-" else value, -1, match[2], rest)


def _with_rest(value: Fraction, decimals: int, currency: str, rest: str) -> Number | None:
    """Return the number with what follows its digits: a percent sign, a word like "million", a unit."""
    if scale := _SCALE.match(rest):
        value, decimals, rest = value * _LARGE[scale[1]], -1, rest[scale.end() :]
    if percent := _PERCENT.match(rest):
        rest = rest[percent.end() :]
    named = unit(currency + rest) if not currency else unit(f" {currency}{rest}")
    return None if named is None else Number(value, percent is not None, decimals, named)
