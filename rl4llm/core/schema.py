"""Check values against annotations with ranges and choices. All options and keys use this one mechanism.

    clip_low: Annotated[float, Range(0, without=0)] = 0.2    # or, shorter, Positive
    kl_in: Literal["loss", "reward"] = "loss"

`check_fields` checks a dataclass, such as the configuration; `check_options` the options beside a name; `checked` the
arguments of a constructor that users call themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rl4llm.core.errors import ConfigError, did_you_mean, unknown
from rl4llm.core.redact import HIDDEN
from rl4llm.core.registry import elsewhere

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

WHAT: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    types.NoneType: "null",
    list: "a list",
    dict: "a mapping",
}
"""The types that a configuration can hold, and their names in messages."""

TRUTH = {
    "1": True,
    "yes": True,
    "on": True,
    "true": True,
    "0": False,
    "no": False,
    "off": False,
    "false": False,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, in the annotation behind its type; one of the bounds may itself be excluded."""

    low: float
    high: float = math.inf
    without: float | None = None

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and number != self.without

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low} or above" if self.without is None else f"above {self.low}"
        if self.without is None:
            return f"{self.low} to {self.high}"
        above = self.without == self.low
        return (
            f"above {self.low}, at most {self.high}" if above else f"at least {self.low}, below {self.high}"
        )


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, without=0)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 1, without=1)]
Share = Annotated[float, Range(0, 1, without=0)]


def check_fields(item: Any, where: str = "") -> None:
    """Raise ConfigError for a field of a dataclass, or of one in it, whose annotation does not accept the value."""
    hints = hints_of(type(item))
    for field in dataclasses.fields(item):
        key, value = f"{where}.{field.name}".lstrip("."), getattr(item, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, key)
        elif value is not field.default and not fits(value, hints.get(field.name, Any)):
            raise ConfigError(refusal(key, value, hints[field.name]))


def check_options(
    where: str,
    make: Callable[..., Any],
    options: Mapping[str, Any],
    fixed: Collection[str] = (),
    beside: Collection[str] = ("name",),
) -> None:
    """Raise ConfigError for an option that `make` does not accept or that is `fixed`, not for keys `beside` the options, and
    for a wrong value."""
    accepted = accepted_options(make) - set(fixed)
    for name in options:
        if name not in accepted:
            answer = elsewhere("key", f"{where}.{name}") if "." not in where else ""  # an option of a section
            raise ConfigError(answer or unknown(f"{where} option", name, accepted | set(beside)))
    check_values(where, make, options)


def check_values(where: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option whose parameter's annotation does not accept the value.

    A parameter without an annotation, or with one that no YAML file can hold, accepts any value.

    >>> def limit(most: Count | None = None): ...
    >>> check_values("env", limit, {"most": 0})
    ConfigError: env.most=0 is not accepted: a whole number, 1 or above, or null.
    """
    hints = hints_of(make)
    for name, value in options.items():
        if not fits(value, hints.get(name, Any)):
            raise ConfigError(refusal(f"{where}.{name}", value, hints[name]))


def with_options(
    where: str, make: Callable[..., T], options: Mapping[str, Any], *args: Any, **fixed: Any
) -> T:
    """Call `make` with a user's options, after checking that it takes them and needs no other; raises ConfigError."""
    check_options(where, make, options, fixed)
    bound = inspect.signature(make).bind_partial(*args, **fixed, **options)
    bound.apply_defaults()
    if missing := [name for name in bound.signature.parameters if name not in bound.arguments]:
        raise ConfigError(f"{where} needs {', '.join(missing)}.")
    return make(*args, **fixed, **options)


def checked(where: str) -> Callable[[Function], Function]:
    """Decorate a constructor that checks its arguments; `where` begins the message and may have arguments in braces."""

    def decorate(make: Function) -> Function:
        signature = inspect.signature(make)

        @functools.wraps(make)
        def checks(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind_partial(*args, **kwargs)
            arguments = dict(bound.arguments)
            bound.apply_defaults()
            check_values(where.format_map(bound.arguments), make, arguments)
            return make(*args, **kwargs)

        return cast(Function, checks)

    return decorate


def refusal(where: str, value: Any, hint: Any) -> str:
    """Return the message for a refused value: what was given, what is accepted, the closest choice."""
    near = did_you_mean(value, choices_of(hint)) if isinstance(value, str) else ""
    if value is None:
        near = " Set a value, or leave the key out if it has a default."
    elif value == HIDDEN:
        near = " Set it, or its environment variable, as for the run."
    elif means_null(value, hint):
        near = " Did you mean null?"
    elif isinstance(value, str) and not near and in_words(hint).startswith("a list"):
        near = f" Did you mean [{value:.80}]?"
    return f"{where}={value!r:.200} is not accepted: {in_words(hint)}.{near}"


def accepted_options(make: Callable[..., Any]) -> set[str]:
    """Return the names of the keyword parameters of a function or of a class and the bases it passes **kwargs to."""
    makers = _makers(make) if inspect.isclass(make) else [make]
    names: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names |= {parameter.name for parameter in parameters if parameter.kind in kinds}
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"self"}


def _makers(cls: type) -> list[Callable[..., Any]]:
    """Return the constructors of a class and its bases."""
    return [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]


def hints_of(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, or of each parameter of a function or of a class and its bases."""
    if inspect.isclass(make) and not dataclasses.is_dataclass(make):
        return {name: hint for maker in reversed(_makers(make)) for name, hint in hints_of(maker).items()}
    try:
        return _evaluated(cast("Any", make))
    except (NameError, TypeError, AttributeError, SyntaxError, ValueError):
        return {}  # an annotation uses names that only a type checker imports


_evaluated = functools.lru_cache(1024)(functools.partial(get_type_hints, include_extras=True))


def fits(value: Any, hint: Any) -> bool:
    """Return whether an annotation accepts a value; numbers must be finite."""
    kind, inner = _kind(hint), get_args(hint)
    if kind is Union:
        return any(fits(value, option) for option in inner)
    if kind is Annotated:
        return fits(value, inner[0]) and all(
            value in option for option in inner[1:] if isinstance(option, Range)
        )
    if kind is Literal:
        return any(isinstance(value, type(option)) and value == option for option in inner)
    if kind is float:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if kind is int:
        return not isinstance(value, bool) and isinstance(value, Integral)
    if kind is list:
        alike = bool(inner) and set(inner) <= {inner[0], ...}
        return isinstance(value, list | tuple) and (
            not alike or all(fits(option, inner[0]) for option in value)
        )
    if kind is dict:
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values() if inner)
    return kind not in WHAT or isinstance(value, kind)


def typed(value: Any, hint: Any) -> Any:
    """Return a value as an annotation takes it: a path as text, a text as a number, and a whole number as a float."""
    kinds = _types(hint)
    if isinstance(value, Path):
        return str(value)
    if bool in kinds and str not in kinds:
        return TRUTH.get(str(value).lower(), value)
    if isinstance(value, int | str) and not isinstance(value, bool) and not kinds & {str, Any}:
        number = int if int in kinds else float if float in kinds else type(value)
        with contextlib.suppress(ValueError):
            return number(value)
    return value


def means_null(value: Any, hint: Any) -> bool:
    """Return whether a text such as None is given where any text is accepted, and null too, which was meant."""
    inner = get_args(hint)
    return isinstance(value, str) and value.lower() == "none" and str in inner and types.NoneType in inner


def _kind(hint: Any) -> Any:
    """Union, Annotated, Literal, one of `WHAT`, or something that no configuration holds."""
    origin = get_origin(hint) or hint
    if origin in (tuple, Sequence):
        return list
    return {types.UnionType: Union, Mapping: dict}.get(origin, origin)


def in_words(hint: Any) -> str:
    """Return what an annotation accepts, such as "a whole number, 1 or above, or null"."""
    kind, inner = _kind(hint), get_args(hint)
    if kind is Union:
        words = list(dict.fromkeys(map(in_words, inner)))
        return (", or " if any("," in word for word in words) else " or ").join(words)
    if kind is Annotated:
        return ", ".join(
            [in_words(inner[0]), *(str(option) for option in inner[1:] if isinstance(option, Range))]
        )
    if kind is Literal:
        return " or ".join(filter(None, [", ".join(map(str, inner[:-1])), str(inner[-1])]))
    if kind is list and inner and _kind(inner[0]) in (*WHAT, Annotated):
        return f"a list, each item {in_words(inner[0])}"
    if kind is dict and inner and _kind(inner[1]) in (*WHAT, Annotated):
        return f"a mapping, each value {in_words(inner[1])}"
    return WHAT.get(kind, "an object")


def takes(hint: Any, kind: type) -> bool:
    """Return whether an annotation names a type, alone or among others; items of lists do not count."""
    return kind in _types(hint)


def is_text(hint: Any) -> bool:
    """Return whether an annotation accepts strings and nothing else, except perhaps null."""
    return str in (kinds := _types(hint)) and kinds <= {str, types.NoneType}


def hint_in(hint: Any, name: str | int) -> Any:
    """Return the annotation of a field of a dataclass or of an item of a list; Any for what is not annotated."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hints_of(hint).get(str(name), Any)
    lists = (get_args(option) for option in (hint, *get_args(hint)) if _kind(option) is list)
    return next((inner[0] for inner in lists if inner), Any)


def _types(hint: Any) -> set[Any]:
    """Return the types of an annotation: members of unions, and the types of choices."""
    kind, inner = _kind(hint), get_args(hint)
    if kind is Literal:
        return {type(option) for option in inner}
    if kind is Annotated:
        return _types(inner[0])
    return set().union(*map(_types, inner)) if kind is Union else {kind}


def choices_of(hint: Any) -> list[str]:
    """Return the strings that an annotation lists as the only choices."""
    if _kind(hint) is Literal:
        return [choice for choice in get_args(hint) if isinstance(choice, str)]
    return [
        choice for part in get_args(hint) if _kind(hint) in (Union, Annotated) for choice in choices_of(part)
    ]
