"""Read requests: every number and name that a client sends has a type and a bound before anything is built from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Range, check_values

LONGEST_JSON = 4 << 20  # bytes; the event loop reads such a body
LONGEST_DATA = 64 << 20  # bytes of a training request; the SDK sends 5 MB at once, or a single datum
LONGEST_FIELD = 4096  # characters of a string, or items of a list
MOST_DATA = 16_384  # of a training request; the SDK sends 1,024
MOST_TARGETS = 128  # at one place
Likely = Annotated[int, Range(0, MOST_TARGETS)]
Samples = Annotated[int, Range(1, 4096)]
Result = TypeVar("Result")


def call(do: Callable[..., Result], body: Any, where: str, **more: Any) -> Result:
    """Call a function with the fields of a JSON object that its parameters name; null ones have the parameter's default.

    Raises ConfigError, which names a field as `where` has it, for one that is missing, too long or not of its type.
    """
    if not isinstance(body, dict):
        raise ConfigError(f"{where}={body!r:.200} is not accepted: a JSON object.")
    parameters = {
        one.name: one for one in inspect.signature(do).parameters.values() if one.kind is not one.VAR_KEYWORD
    }
    given = {name: value for name, value in body.items() if value is not None and name not in more}
    fields = {name: value for name, value in given.items() if name in parameters}
    for name, value in fields.items():
        long = isinstance(value, str | list) and len(value) > LONGEST_FIELD
        if long or (isinstance(value, int) and value.bit_length() > 63):
            raise ConfigError(
                f"{where}.{name} is not accepted: more than {LONGEST_FIELD:,} characters or items, or more than 64 bits."
            )
    check_values(where, do, fields)
    for name, one in parameters.items():
        if one.default is one.empty and name not in {**fields, **more}:
            raise ConfigError(f"{where}.{name} is missing.")
    takes_rest = len(parameters) < len(inspect.signature(do).parameters)
    return do(**more, **(given if takes_rest else fields))
