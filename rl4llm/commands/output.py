"""What commands print: results to standard output, all else to standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

STOPPED = 75  # EX_TEMPFAIL: asked to stop before it was done; the same command goes on with it


def say(text: str) -> None:
    """A line about what goes on, to standard error."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text)


def show(*items: Any) -> None:
    """A result for people: texts, or tables of rich."""
    console = Console(markup=False, highlight=False)
    for item in items:
        console.print(item, soft_wrap=isinstance(item, str))


def write_json(value: Any) -> None:
    """A result for scripts: one line."""
    sys.stdout.write(json.dumps(value) + "\n")
