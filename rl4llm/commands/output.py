"""What commands print: results to standard output, all else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, redirect_stdout
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rl4llm.tables import Facts

STOPPED = 75  # EX_TEMPFAIL: asked to stop before it was done; the same command goes on with it


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process here; what the exit code is, `rl4llm.cli` says."""
        raise BrokenPipeError


def say(text: str) -> None:
    """A line about what goes on, to standard error."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text)


def meanwhile() -> AbstractContextManager[Any]:
    """Inside it, what a run says of its progress goes to standard error, so that only the result is on standard output."""
    return redirect_stdout(sys.stderr)


def show(*items: Any) -> None:
    """A result for people: texts, or tables of rich."""
    console = _Terminal(markup=False, highlight=False)
    for item in items:
        console.print(item, soft_wrap=isinstance(item, str))


def show_facts(facts: Iterable[Facts], as_json: bool) -> None:
    """A result of several tables, or the same as JSON."""
    from rl4llm import tables

    if as_json:
        write_json(tables.as_json(facts))
    else:
        show(*(item.table() for item in facts))


def write_json(value: Any) -> None:
    """A result for scripts: one line."""
    write_text(json.dumps(value) + "\n")


def write_text(text: str) -> None:
    """A result as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()  # a pipe that nobody reads is found here, not when Python ends
