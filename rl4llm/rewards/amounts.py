"""Numbers in prose: which one stands alone, so that it can be an answer, and its unit."""

from __future__ import annotations

import re

from rl4llm.rewards.quantities import rewritten, unit

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

_NUMBERS = re.compile(rf"{NUMBER}(?:(?: ?, ?| ?,? and | ?,? or ){NUMBER}){{0,20}}", re.IGNORECASE)
_UNIT_AFTER = re.compile(r"[ -]?(?:[A-Za-z°€¥元]{1,14}(?:\^?[23]|[²³])?(?: per | ?/ ?| of )?[ -]?){1,4}")

BEFORE = {
    "AZYUK2": rf"[\w!.^_{{}}\\/*+=<>()\[\]|{_MINUS}]$",
    "of y = 3": rf"[\d+*/=^<>(\u00d7\u00f7≤≥≠{_MINUS}] +$",
    "(x,3)": r"[\w)}\]],$",
    "f(2), 3": r"[\d)}\]], +$",
    "x \\geq 5 there": r"\\[A-Za-z]+ *$",
    "a ratio of 4: 3": r"\d: *$",
    "no more than 3": r"(?:\b(?:not|than|least|most)|n't) +$",
    "1 in 6": r"\d (?:in|to|out of) +$",
}
"""What stands before a number that is part of other notation, each with a text whose last number therefore is no answer."""

AFTER = {
    "grows as 3_x": r"[\w^_{}\\(\[/*+=<>|]",
    "a 3!-fold": r"!\S",
    "a pair 3,x": r",\S",
    "with 3 + x": rf" ?[*+/^=<>\\(\u00d7\u00f7{_MINUS}] ?[\w\\(]",
}
"""What stands behind such a number, each with a text."""

_BEFORE, _AFTER = re.compile("|".join(BEFORE.values())), re.compile("|".join(AFTER.values()))
_OPERAND = re.compile(r"[\d)}\]] *$|(?:^|[^A-Za-z])[A-Za-z] *$")


def last_number(text: str) -> str | None:
    """Return the last number, or list of numbers, with its unit; None if it does not stand alone.

    >>> last_number("costs $1,234.50!"), last_number("It took 3 and 4 hours"), last_number("x^3 grows")
    ('$1,234.50', '3 and 4 hours', None)
    """
    numbers = list(_NUMBERS.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    after = _UNIT_AFTER.match(text, last.end())
    named = after[0].rstrip() if after else ""
    while named and not unit(f" {rewritten(named)}"):
        named = named.rpartition(" ")[0]
    if not _stands_alone(text, last.start(), last.end() + len(named)):
        return None
    return f"{last[0].strip()} {named.strip()}" if named else last[0].strip()


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a number is no part of other notation, such as a power, a fraction, a pair or an equation."""
    before, after = text[max(0, start - 16) : start], text[end : end + 4]
    if text[start] in _SIGNS and (_OPERAND.search(before) or (text[start + 1] == " " and before.strip())):
        return False
    return _BEFORE.search(before) is None and _AFTER.match(after) is None
