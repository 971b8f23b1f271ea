"""What a name of TRL means here: a key, one of several names that say something together, nothing, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Keys = dict[str, Any]
"""Configuration keys, dotted, and their values."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of TRL's trainers or configs.

    Args:
        kind: "key" becomes keys of its own; "joint" is read together with other names, see `rl4llm.trl.joint`; "inert" has
            no meaning here, and is warned of; "refused" has none and would change what is learned, so that anything but
            `default` is an error.
        default: TRL's.
        says: the key it becomes, why it has no meaning, or what to do instead.
        keys: of a "key", its value as configuration keys.
    """

    kind: Literal["key", "joint", "inert", "refused"]
    default: Any
    says: str
    keys: Callable[[Any], Keys] = lambda value: {}


def key(name: str, default: Any, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Alias:
    """A name whose value, converted, is that of one key."""
    return Alias("key", default, f"`{name}`{note and '; ' + note}", lambda value: {name: convert(value)})


def joint(default: Any, says: str) -> Alias:
    return Alias("joint", default, says)


def inert(default: Any, why: str) -> Alias:
    return Alias("inert", default, why)


def refused(default: Any, instead: str) -> Alias:
    return Alias("refused", default, instead)


def each(make: Callable[[Any, str], Alias], says: str, **defaults: Any) -> Mapping[str, Alias]:
    """Several names of which the same is said."""
    return {name: make(default, says) for name, default in defaults.items()}
