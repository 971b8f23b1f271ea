"""Facts in rows, which people see as a table and scripts as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Facts:
    """Rows under names; `name` is what a script finds them by, `title` what stands above the table."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def table(self) -> Table:
        """For people; lists with commas between, nothing as a dash."""
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*map(_shown, row))
        return table


def as_json(facts: Iterable[Facts]) -> dict[str, list[dict[str, Any]]]:
    """For scripts: each row as a mapping, in a list by name."""
    return {item.name: [dict(zip(item.columns, row, strict=True)) for row in item.rows] for item in facts}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item!r}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
