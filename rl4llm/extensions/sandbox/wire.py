"""Values of a program, parsed with bounds, since a sandbox may send malicious text.

A message is one line of JSON. Its size, its nesting, the digits of its integers and its keys are checked before it is
used; exceeding a bound is the program's fault.
"""

from __future__ import annotations

import cmath
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 20_000
MAX_COLLISIONS = 100


class WireError(Exception):
    """A message that no honest program sends."""


@dataclass(frozen=True, slots=True)
class Iterator:
    """The values of a generator, `map` or `zip`: it does not equal a list, but tests may convert it to one."""

    items: list[Any]


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
    if kind is Iterator:
        return {"iterator": [encode(item) for item in value.items]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
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
        return len(value) == len(expected) and all(
            same(one, other, float_tolerance) for one, other in zip(value, expected, strict=True)
        )
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


def same_text(printed: str, expected: str) -> bool:
    """Return whether a program printed the expected text, ignoring spaces at ends of lines and empty lines at the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _pairs(content: Any) -> dict[Any, Any]:
    pairs = [(decode(key), decode(item)) for key, item in content]
    _hashable([key for key, _ in pairs])
    if len(dict(pairs)) != len(pairs):
        raise WireError("a dict with a key twice")
    return dict(pairs)


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
    "iterator": lambda content: Iterator(decode(list(content))),
    "complex": lambda content: complex(float(content[0]), float(content[1])),
}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("a key twice")
    return made


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise WireError(f"an integer of {len(digits)} digits")
    return int(digits)


def _number(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise WireError("a number of many digits")
    return float(text)


def _check_depth(value: Any) -> None:
    """Check the nesting level by level, since it is not trusted."""
    level = [value]
    for _ in range(2 * MAX_DEPTH + 4):  # a dict nests an object, a list of pairs and a pair
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise WireError("a value that is nested too deeply")
