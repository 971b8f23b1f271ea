"""What commands print: results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl4llm.runtime.terminal import Terminal

if TYPE_CHECKING:
    from rich.table import Table

STOPPED = 75  # EX_TEMPFAIL: a signal stopped the run, and the same command resumes it


@dataclass(frozen=True, slots=True)
class Facts:
    """A table: scripts find it by its `name`, and people read its `title`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def table(self) -> Table:
        return table(self.title, self.columns, self.rows)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table for the terminal; the items of a list are joined by commas, and an empty cell is a dash."""
    from rich.table import Table

    grid = Table(*columns, title=title)
    for row in rows:
        grid.add_row(*map(_cell, row))
    return grid


class _Output(Terminal):
    def on_broken_pipe(self) -> None:
        """Raise the error, since rich would end the process here; `rl4llm.cli` returns the exit code."""
        raise BrokenPipeError


def say(text: str) -> None:
    """Print a line about progress or a problem to standard error."""
    Terminal(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text)


def meanwhile() -> AbstractContextManager[Any]:
    """Send the progress of a run to standard error, so that only the result is on standard output."""
    return redirect_stdout(sys.stderr)


def show(*items: Any) -> None:
    """Print a result for people: strings, or tables of rich."""
    console = _Output(markup=False, highlight=False)
    for item in items:
        console.print(item, soft_wrap=isinstance(item, str))


def show_facts(facts: Iterable[Facts], as_json: bool) -> None:
    """Print tables, or the same as JSON."""
    if as_json:
        rows = {item.name: [dict(zip(item.columns, row, strict=True)) for row in item.rows] for item in facts}
        write_json(rows)
    else:
        show(*(item.table() for item in facts))


def write_json(value: Any) -> None:
    """Print a result for scripts: one line of JSON."""
    write_text(json.dumps(value) + "\n")


def write_text(text: str) -> None:
    """Print a string unchanged."""
    sys.stdout.write(text)
    sys.stdout.flush()  # finds a closed pipe here and not when Python ends


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item!r}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
