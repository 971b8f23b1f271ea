"""Whether options of a user have the types that a class or function says it takes."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl4llm.core.errors import ConfigError

WHAT: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    types.NoneType: "null",
    list: "a list",
    dict: "a mapping",
}
"""What a configuration can hold, in words."""


def check_types(where: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that is of another type than its parameter; numbers must be finite.

    A parameter whose annotation is of anything that no YAML file can hold, or that has none, takes whatever it is given.

    >>> def limit(most: int | None = None): ...
    >>> check_types("env", limit, {"most": "many"})
    ConfigError: env.most='many' is not accepted: a whole number or null.
    """
    hints = _hints(make)
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            raise ConfigError(f"{where}.{name}={value!r:.200} is not accepted: {in_words(hints[name])}.")


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each parameter: of a function, or of a class and its bases, whose own ones count first."""
    if dataclasses.is_dataclass(make) or not inspect.isclass(make):
        return _found(make)
    makers = [vars(cls)["__init__"] for cls in make.__mro__ if "__init__" in vars(cls)]
    return {name: hint for maker in reversed(makers) for name, hint in _found(maker).items()}


def _found(item: Any) -> dict[str, Any]:
    try:
        return get_type_hints(item)
    except (NameError, TypeError, AttributeError, SyntaxError, ValueError):  # of names that only a type checker imports
        return {}


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = _kind(hint), get_args(hint)
    if kind is Union:
        return any(_fits(value, one) for one in inner)
    if kind is float:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if kind is int:
        return not isinstance(value, bool) and isinstance(value, Integral)
    if kind is list:
        alike = bool(inner) and set(inner) <= {inner[0], ...}
        return isinstance(value, list | tuple) and (not alike or all(_fits(one, inner[0]) for one in value))
    if kind is dict:
        return isinstance(value, Mapping)
    return kind not in WHAT or isinstance(value, kind)


def _kind(hint: Any) -> Any:
    """Union, one of `WHAT`, or something that no configuration holds."""
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        return Union
    if origin is Literal:  # which of them it may be, its class says with the closest one
        kinds = {type(one) for one in get_args(hint)}
        return kinds.pop() if len(kinds) == 1 else origin
    if origin in (tuple, Sequence):
        return list
    return dict if origin is Mapping else origin


def in_words(hint: Any) -> str:
    """What values an annotation stands for, such as "a whole number or null"."""
    if _kind(hint) is Union:
        return " or ".join(dict.fromkeys(in_words(one) for one in get_args(hint)))
    inner = get_args(hint)
    if _kind(hint) is list and inner and _kind(inner[0]) in WHAT:
        return f"a list, each item of it {in_words(inner[0])}"
    return WHAT.get(_kind(hint), "an object")
