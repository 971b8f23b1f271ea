"""What a name of TRL becomes: a key, one of several names that are combined, nothing, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Keys = dict[str, Any]
"""Dotted configuration keys and their values."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of TRL's trainers or configs.

    Args:
        kind: "key" becomes one or more keys; "joint" is combined with other names, see `rl4llm.extensions.trl.joint`;
            "inert" has no effect, which is logged as a warning; "refused" has no counterpart but would change the result,
            so that any value except `default` is an error.
        default: TRL's default.
        says: the key it becomes, why it has no effect, or what to do instead.
        keys: returns the configuration keys for a value of a "key".
    """

    kind: Literal["key", "joint", "inert", "refused"]
    default: Any
    says: str
    keys: Callable[[Any], Keys] = lambda value: {}
