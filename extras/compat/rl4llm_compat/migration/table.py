"""The table of verl's keys, `verl.yaml`: which key of ours each becomes, or why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

Keys = dict[str, Any]
"""Dotted configuration keys of rl4llm and their values."""


def _path(value: Any) -> str:
    return str(Path(str(value)).expanduser())


def at_least_zero(value: Any) -> int:
    """Return 0 for the -1 that switches something off in verl."""
    return max(0, int(value or 0))


def sees(column: str) -> str:
    """Return the `model.vision` of rows with images in a column. Raises ValueError for a column that is not read."""
    if column not in ("image", "images"):
        raise ValueError(column)
    return "frozen"


CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "as_it_is": lambda value: value,
    "at_least_zero": at_least_zero,
    "first_file": lambda files: _path(files[0] if isinstance(files, list) else files),
    "if_set": lambda value: value,
    "limit": lambda count: count if count and count > 0 else None,
    "path": _path,
    "sees": sees,
    "skip_or_stop": lambda drop: "skip" if drop else "stop",
}
"""What `by` names; `if_set` leaves a key out whose value is empty."""


@dataclass(frozen=True, slots=True)
class Row:
    """A key of verl.

    Args:
        ours: our keys, for example "`rollout.prompts`"; "" if there is none.
        note: what differs, or why there is none.
        to: the one key that it becomes; "" if a rule reads several keys at once.
        by: the name of the converter of its value.
    """

    ours: str = ""
    note: str = ""
    to: str = ""
    by: str = "as_it_is"

    def __str__(self) -> str:
        """Return the counterpart as one phrase."""
        if not self.ours:
            return f"no counterpart: {self.note}"
        return f"{self.ours} ({self.note})" if self.note else self.ours

    def keys(self, value: Any) -> Keys:
        """Return our key for a value. Raises TypeError or ValueError for a value that cannot be converted."""
        return {} if self.by == "if_set" and not value else {self.to: CONVERTERS[self.by](value)}


def _rows(table: Mapping[str, Any]) -> dict[str, Row]:
    rows = {name: Row(says) for says, names in table["see"].items() for name in names.split()}
    rows |= {name: Row(note=why) for why, names in table["none"].items() for name in names.split()}
    for item in table["to"]:
        row = Row(f"`{item['to']}`", item.get("note", ""), item["to"], item.get("by", "as_it_is"))
        rows |= dict.fromkeys(item["of"].split(), row)
    return rows


_TABLE = yaml.safe_load(Path(__file__).with_name("verl.yaml").read_text(encoding="utf-8"))
ROWS = _rows(_TABLE)
DEFAULTS: Mapping[str, Any] = _TABLE["defaults"]


def row_of(key: str) -> Row | None:
    """Return the row of a key of verl, or None. An exact key comes before a pattern, and the longest pattern first."""
    patterns = sorted((name for name in ROWS if "*" in name and fnmatchcase(key, name)), key=len)
    return ROWS.get(key) or (ROWS[patterns[-1]] if patterns else None)
