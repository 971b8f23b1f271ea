"""Answers that are refused unread: too long, too deep, or made to burn time in computer algebra.

The workers would survive them too, at the price of a time limit each. The trusted answer sets what is allowed: a sum may
be answered where a sum is expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import comb, prod

from rl4llm.rewards.quantities import number

MAX_CHARS = 400
MAX_DEPTH = 12
MAX_DIGITS = 60
MAX_EXPONENT_DIGITS = 4
MAX_FACTORIAL_DIGITS = 2
MAX_TOWER = 2
MAX_POWER_OF_SUM = 30
MAX_TERMS = 20_000
MAX_DEGREE = 300
MAX_POWERS = 40
MAX_SUBSCRIPTS = 20
_COSTLY = ("\\sum", "\\prod", "\\int", "\\lim", "\\binom", "\\choose", "\\mod", "\\bmod", "\\pmod")
_LISTS = (",", ";", "or", "\\cup", "\\pm", "\\{", "=", "<", ">", "\\le", "\\ge", "\\in")
_RELATES = re.compile(r"\\(?:approx|equiv)(?![A-Za-z])|\bor\b|\band\b")
_FOREIGN = re.compile(r"[&|~@#?`:;<>\"\u2190-\u23ff]|\.\s*\.|[\d}]\s+\.|\d\.\s+\d")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?")
_OF_NUMBERS = {
    "frac", "dfrac", "tfrac", "cfrac", "sqrt", "cdot", "times", "div", "pi", "left", "right", "displaystyle", "quad",
    "degree", "text", "textbf", "textit", "textrm", "textnormal", "mathrm", "mathbf", "mbox", "boxed", "log", "ln", "lg",
    "exp", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "lfloor",
    "rfloor", "lceil", "rceil", "binom", "over", "overline", "bar", "dot", "!", ",", ";", ":", "%", "$", " ",
}  # fmt: skip
_STRANGE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
_FACTORIAL = re.compile(r"(?<!\\)(\w{0,40})\s?!")  # and what stands before it
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CLOSES = {"{": "}", "(": ")"}
_INNER_EQUATION = re.compile(r"(?<!\\text)\{[^{}]*=")
_SCIENTIFIC = re.compile(r"\d\.?[eE][-+]?\d{4}")
_HUGE_ARGUMENT = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])[^+=]{0,40}?\d\s?\^\s?\{?\s?(\d{3,})")


def refuse(answer: str, gold: str) -> str | None:
    """Return why an answer is refused, None if it is not; what the trusted answer `gold` has is allowed."""
    max_digits = max(MAX_DIGITS, 2 * _digits(gold))
    max_degree = max([MAX_DEGREE, *(2 * int(power) for power in re.findall(r"\d{1,9}", gold))])
    checks = {
        f"more than {MAX_CHARS} characters": len(answer) > MAX_CHARS,
        "characters that no answer has": bool(_STRANGE.search(answer)),
        "braces that do not match": not _balanced(answer),
        f"brackets nested more than {MAX_DEPTH} deep": _depth(answer) > MAX_DEPTH,
        f"more than {max_digits} digits": _digits(answer) > max_digits,
        "an astronomical power": any(map(_astronomical, _exponents(answer)))
        or bool(_SCIENTIFIC.search(answer))
        or _chained(answer) >= 10**MAX_EXPONENT_DIGITS,
        "a tower of powers": _tower(answer) > max(MAX_TOWER, _tower(gold)),
        "a large power of a sum": any(
            int(power) > MAX_POWER_OF_SUM and power not in gold
            for inside, power in _powers_of_brackets(answer)
            if re.search(r"[+-]", inside.lstrip("({")[1:])
        ),
        "powers that expand to too many terms": _terms(answer, gold) > MAX_TERMS,
        "a large power of a variable": _degree(answer) > max_degree,
        f"more than {MAX_POWERS} powers": _plain(answer).count("^")
        > max(MAX_POWERS, 2 * _plain(gold).count("^")),
        "a trigonometric function of an astronomical number": any(
            power not in gold for power in _HUGE_ARGUMENT.findall(answer)
        ),
        "a large root": any(index not in gold for index in re.findall(r"\\sqrt\[(\d{3,})", answer)),
        f"more than {MAX_SUBSCRIPTS} subscripts": answer.count("_") > max(MAX_SUBSCRIPTS, gold.count("_")),
        "a set where the order counts": _opens(gold) == "(" and _opens(answer) == "{",
        "a factorial": "!" not in gold
        and not all(
            number.isalpha() or (number.isdigit() and len(number) <= MAX_FACTORIAL_DIGITS)
            for number in _FACTORIAL.findall(answer.replace("\\!", ""))  # LaTeX's negative space
        ),
    }
    reasons = [reason for reason, holds in checks.items() if holds]
    reasons += [command for command in _COSTLY if command in answer and command not in gold]
    if _INNER_EQUATION.search(answer) and not _INNER_EQUATION.search(gold):
        reasons.append("an equation inside braces")
    reasons += [f"more than one thing, by {mark!r}" for mark in _lists(answer, gold)]
    return next(iter(reasons), None)


def _astronomical(exponent: str) -> bool:
    """Return whether a power with this exponent takes too long to compute."""
    if re.search(rf"\d{{{MAX_EXPONENT_DIGITS + 1}}}", exponent.replace(",", "")):
        return True
    return ("^" in exponent or "!" in exponent) and not re.search("[A-Za-z]", _COMMAND.sub("", exponent))


def _lists(answer: str, gold: str) -> Iterator[str]:
    """Yield what makes the answer a list or a statement where the trusted one is a single thing.

    Computer algebra takes the last number of what it cannot read, so that "17 \\to 18" would be 18.
    """
    if any(mark in gold for mark in _LISTS):
        return
    yield from _RELATES.findall(answer)
    if number(gold) is None:
        return
    answer = _DEGREES.sub("", answer)
    commands = re.findall(r"\\([A-Za-z]+|.)", answer)
    yield from (name for name in commands if name not in _OF_NUMBERS and f"\\{name}" not in gold)
    yield from _FOREIGN.findall(re.sub(r"\\.", "", answer))
    values = {value.value for side in answer.split("=") if (value := number(side.strip()))}
    if len(values) > 1:
        yield "="


def _exponents(answer: str) -> Iterator[str]:
    """Yield what stands after each ``^`` or ``**``, with "^" where a power follows at once, as in 9^9^9 or (9^9)^9."""
    answer = _plain(answer)
    for match in re.finditer(r"\^", answer):
        end = _end_of_exponent(answer, match.end())
        number = answer[: match.start()][-1:].isdigit()
        follows = number and re.match(r"[})]*\^", answer[end : end + 20])
        yield answer[match.end() : end] + ("^" if follows else "")


def _end_of_exponent(answer: str, start: int) -> int:
    """Return the end of the group, or of the run of letters and digits, that begins at `start`."""
    opens = answer[start : start + 1]
    if opens not in _CLOSES:
        return start + len(re.findall(r"^[-+]?\w*", answer[start:])[0])
    depth = 0
    for index in range(start, len(answer)):
        depth += (answer[index] == opens) - (answer[index] == _CLOSES[opens])
        if depth == 0:
            return index + 1
    return len(answer)


def _opens(text: str) -> str:
    """Return the bracket that a text begins with."""
    return text.strip().removeprefix("\\left").lstrip(" \\")[:1]


def _tower(answer: str) -> int:
    """How deep powers stand in exponents: 1 for x^2, 2 for x^{y^2}."""
    return max((1 + _tower(exponent.removesuffix("^")) for exponent in _exponents(answer)), default=0)


def _powers_of_brackets(answer: str) -> Iterator[tuple[str, str]]:
    """Yield what stands in each bracket that is raised to a whole number, from its opening, and the number."""
    answer = _plain(answer)
    for match in re.finditer(r"\)\^\{?(\d{1,9})", answer):
        depth, start = 0, match.start()
        while start > 0:
            depth += (answer[start] == ")") - (answer[start] == "(")
            if depth == 0:
                break
            start -= 1
        yield answer[start : match.start()], match[1]


def _terms(answer: str, gold: str) -> int:
    """About how many terms the powers of brackets make, multiplied out; those that the trusted answer has are free."""
    terms = 1
    for inside, power in _powers_of_brackets(answer):
        if power not in gold:
            summands = 1 + len(re.findall(r"(?<=[^(^{*/])[+-]", inside[1:]))
            terms *= comb(int(power[:4]) + max(summands, 2) - 1, max(summands, 2) - 1)
    return terms


def _chained(answer: str) -> int:
    """Return the largest product of whole-number exponents that are applied one after the other, as in ((x^2)^3)^4."""
    chains = re.findall(r"\^\{?\d{1,9}(?:[})]+\^\{?\d{1,9})+", _plain(answer))
    return max((prod(map(int, re.findall(r"\d+", chain))) for chain in chains), default=0)


def _degree(answer: str) -> int:
    """Return the largest whole-number exponent of a letter, or of a bracket with a letter in it."""
    powers = [
        power
        for inside, power in _powers_of_brackets(answer)
        if re.search("[a-zA-Z]", _COMMAND.sub("", inside))
    ]
    return max(map(int, powers + re.findall(r"[a-zA-Z]\^\{?(\d{1,9})", _plain(answer))), default=0)


def _plain(answer: str) -> str:
    """Return the answer with one sign for powers and one kind of brackets, without white space."""
    return re.sub(r"\s+", "", answer.replace("**", "^").replace("\\left", "").replace("\\right", ""))


def _digits(text: str) -> int:
    return sum(char.isdigit() for char in text)


def _balanced(answer: str) -> bool:
    depth = 0
    for index, char in enumerate(answer):
        if answer[index - 1 : index] != "\\":
            depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def _depth(answer: str) -> int:
    depth = deepest = 0
    for char in answer:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest
