"""Values of a program, parsed with bounds, since a sandbox may send malicious text.

A message is one line of JSON. Its size, its nesting, the digits of its integers and its keys are checked before it is
used; exceeding a bound is the program's fault.
"""

from __future__ import annotations

import cmath
import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 20_000
MAX_COLLISIONS = 100
MAX_EXPONENT = 10_000
RELATIVE, ABSOLUTE, LARGEST = Fraction(1, 10**5), Fraction(1, 10**8), Fraction(1, 10**4)


class WireError(Exception):
    """A message that no honest program sends."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An object of the program that stays in its sandbox, as the number and the class that tests know it by."""

    number: int
    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class Array:
    """An array of numpy, as its type and nested lists."""

    dtype: str
    items: Any


def read(line: bytes | bytearray) -> dict[str, Any]:
    """Return the message in a line: a JSON object with encoded values. Raises WireError."""
    try:
        message = json.loads(line, object_pairs_hook=_unique, parse_int=_integer, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {str(error)[:100]}") from None
    if not isinstance(message, dict):
        raise WireError("not a message: no object")
    _check_depth(message)
    return message


def write(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line that is both JSON and a Python literal, including lone surrogates."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def encode(value: Any) -> Any:
    """Return a Python literal as JSON. A type that JSON does not have becomes {type: content}. Raises WireError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.decode("latin-1")}
    return _encoded_object(kind, value)


def _encoded_object(kind: type, value: Any) -> Any:
    if kind is Handle:
        return {"object": [value.number, value.name]}
    if kind is Array:
        return {"ndarray": [value.dtype, encode(value.items)]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (Decimal, Fraction):
        return {kind.__name__: str(value)}
    if kind in (datetime.date, datetime.datetime, datetime.time):
        return {kind.__name__: value.isoformat()}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    raise WireError(f"a {kind.__name__} is not a literal")


def decode(value: Any) -> Any:
    """Return the Python literal that was encoded. Raises WireError if it is not valid."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise WireError("an object that is no literal")
    ((kind, content),) = value.items()
    try:
        return _MAKERS[kind](content)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise WireError(f"an object that is no literal: {str(error)[:100]}") from None


def same(value: Any, expected: Any, float_tolerance: float = 0.0) -> bool:
    """Return whether two literals are equal, including the types of all values in them. NaN equals NaN."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same(*pair, float_tolerance) for pair in pairs)
    if isinstance(value, dict):
        keys = {(type(key), key): key for key in expected}
        return len(value) == len(expected) and all(
            (type(key), key) in keys and same(item, expected[key], float_tolerance)
            for key, item in value.items()
        )
    if isinstance(value, set | frozenset):
        return {(type(item), item) for item in value} == {(type(item), item) for item in expected}
    if isinstance(value, float):
        both_nan = math.isnan(value) and math.isnan(expected)
        return both_nan or math.isclose(value, expected, rel_tol=float_tolerance, abs_tol=float_tolerance)
    if isinstance(value, complex):
        return cmath.isclose(value, expected, rel_tol=float_tolerance, abs_tol=float_tolerance)
    return value == expected


def agrees(value: Any, expected: Any) -> bool:
    """Return whether a value is what JSON says that is expected: tuples are lists, keys are texts, 2.0 is 2.

    Where a fraction is expected, a number may differ by 1e-8 plus 1e-5 of it, as in the judge of APPS, but at most by
    1e-4, so that whole numbers in it are exact. Whole numbers must be equal.
    """
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(agrees, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        texts = {str(key): item for key, item in value.items()}
        named = {str(key): item for key, item in expected.items()}
        matches = len(texts) == len(value) and texts.keys() == named.keys()
        return matches and all(agrees(item, named[key]) for key, item in texts.items())
    numbers = int | float | Decimal | Fraction
    if isinstance(expected, float) and isinstance(value, numbers) and not isinstance(value, bool):
        return _near(value, expected)
    return bool(value == expected)


def same_text(printed: str, expected: str) -> bool:
    """Return whether a program printed what was expected, line by line and token by token.

    Spaces around tokens and empty lines do not count. Two numbers are equal by their value, with the tolerance of
    `agrees` where a fraction is expected; 007 is text. The case of letters counts.
    """
    lines = [[line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected)]
    return len(lines[0]) == len(lines[1]) and all(
        line == answer or (len(line) == len(answer) and all(map(_same_token, line, answer)))
        for line, answer in zip(*lines, strict=True)
    )


_NUMBER = re.compile(r"[+-]?(?=\.?[0-9])(0|[1-9][0-9]{0,9999})?(\.[0-9]{0,9999})?([eE][+-]?[0-9]{1,3})?")


def _same_token(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not all(map(_NUMBER.fullmatch, (printed, expected))):
        return False
    numbers = Decimal(printed), Decimal(expected)
    return numbers[0] == numbers[1] if expected.lstrip("+-").isdigit() else _near(*map(Fraction, numbers))


def _near(value: Any, expected: Any) -> bool:
    """Return whether a number is close to a fraction; both may be infinite or NaN."""
    if not (_is_finite(value) and _is_finite(expected)):
        return bool(value == expected) or (value != value and expected != expected)
    value, expected = Fraction(value), Fraction(expected)
    return bool(abs(value - expected) <= min(RELATIVE * abs(expected) + ABSOLUTE, LARGEST))


def _is_finite(number: Any) -> bool:
    if isinstance(number, Decimal):
        return number.is_finite()
    return not isinstance(number, float) or math.isfinite(number)


def _pairs(content: Any) -> dict[Any, Any]:
    pairs = [(decode(key), decode(item)) for key, item in content]
    _hashable([key for key, _ in pairs])
    return _unique(pairs)


def _hashable(items: list[Any]) -> list[Any]:
    """Return items for a set; many with the same hash, which are easy to construct, would take hours."""
    if items and max(Counter(map(hash, items)).values()) > MAX_COLLISIONS:
        raise WireError("values that share a hash")
    return items


_MAKERS = {
    "tuple": lambda content: tuple(decode(list(content))),
    "set": lambda content: set(_hashable(decode(list(content)))),
    "frozenset": lambda content: frozenset(_hashable(decode(list(content)))),
    "dict": _pairs,
    "bytes": lambda content: content.encode("latin-1"),
    "bytearray": lambda content: bytearray(content, "latin-1"),
    "complex": lambda content: complex(float(content[0]), float(content[1])),
    "object": lambda content: _handle(*content),
    "ndarray": lambda content: _array(*content),
    "Decimal": lambda content: _decimal(content),
    "Fraction": lambda content: Fraction(*map(_integer, content.split("/"))),
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda content: datetime.timedelta(*content),
}


def _handle(number: Any, name: Any) -> Handle:
    if type(number) is not int or not isinstance(name, str):
        raise WireError("an object without a number")
    return Handle(number, name[:100])


def _array(dtype: str, items: Any) -> Any:
    """Return an array of numbers, texts or booleans; a scalar of numpy is an ordinary number."""
    if not re.fullmatch(r"[<>|=][biufcU][0-9]{1,6}", dtype):
        raise WireError(f"an array of {dtype!r:.20}")
    return Array(dtype, decode(items)) if isinstance(items, list) else decode(items)


def _decimal(text: str) -> Decimal:
    """Return a decimal number whose size and exponent are bounded, since `int` of it may take hours."""
    number = Decimal(_bounded(text))
    if number.is_snan():
        raise WireError("a signaling NaN, which raises when it is compared")
    if number.is_finite() and abs(number.adjusted()) > MAX_EXPONENT:
        raise WireError("a number with a large exponent")
    return number


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(dict(pairs)) != len(pairs):
        raise WireError("a key twice")
    return dict(pairs)


def _bounded(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        raise WireError(f"a number of {len(digits)} digits")
    return digits


def _integer(digits: str) -> int:
    return int(_bounded(digits))


def _number(text: str) -> float:
    return float(_bounded(text))


def _check_depth(value: Any) -> None:
    """Check the nesting level by level, since it is not trusted."""
    level = [value]
    for _ in range(2 * MAX_DEPTH + 4):  # a dict nests an object, a list of pairs and a pair
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise WireError("a value that is nested too deeply")
