"""What a configuration key of another project becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Keys = dict[str, Any]
"""Dotted configuration keys of rl4llm and their values."""


@dataclass(frozen=True, slots=True)
class Row:
    """A key of another project.

    Args:
        ours: our keys, for example "`rollout.prompts`"; "" if there is none.
        note: what differs, or why there is none.
        keys: returns our keys for a value; None if a rule reads several keys at once, or if there is no counterpart.
    """

    ours: str
    note: str = ""
    keys: Callable[[Any], Keys] | None = None

    def __str__(self) -> str:
        """Return the counterpart as one phrase."""
        if not self.ours:
            return f"no counterpart: {self.note}"
        return f"{self.ours} ({self.note})" if self.note else self.ours


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a file does not contain: the rows of its dataset, None if unknown."""

    rows: int | None = None


@dataclass(frozen=True, slots=True)
class JointRule:
    """Several keys that are read together. Any of `names` triggers it; `keys` returns ours for all values."""

    names: tuple[str, ...]
    keys: Callable[[Mapping[str, Any], DataFacts], Keys]


@dataclass(frozen=True, slots=True)
class Project:
    """The keys of a project.

    Args:
        name: how messages and pages call it.
        rows: by dotted key; a key may be a pattern such as ``global_profiler.*``.
        rules: what reads several keys at once.
        defaults: its defaults that differ from ours; a converted file contains them.
        base: our keys that each converted file begins with.
        prepare: brings values into the form that `rows` and `rules` expect.
    """

    name: str
    rows: Mapping[str, Row]
    rules: tuple[JointRule, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]] = dict

    def row(self, key: str) -> Row | None:
        """Return the row of a key, or None; exact keys come before patterns."""
        if key in self.rows:
            return self.rows[key]
        return next((row for name, row in self.rows.items() if "*" in name and fnmatchcase(key, name)), None)


def key(name: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Row:
    """Return the row of a key whose converted value belongs to one of ours."""
    return Row(f"`{name}`", note, lambda value: {name: convert(value)})


def joint(ours: str, note: str = "") -> Row:
    """Return the row of a key that a rule reads together with others."""
    return Row(ours, note)


def none(why: str) -> Row:
    """Return the row of a key without a counterpart."""
    return Row("", why)


def each(row: Row, *names: str) -> dict[str, Row]:
    """Return the same row for several keys."""
    return dict.fromkeys(names, row)


def at_least_zero(value: Any) -> int:
    """Return 0 for the -1 that switches something off elsewhere."""
    return max(0, int(value or 0))
