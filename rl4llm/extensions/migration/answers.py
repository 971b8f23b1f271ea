"""What rl4llm calls the keys of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.projects import PROJECTS, of_trl
from rl4llm.extensions.migration.row import Row


def of_key(given: str) -> str:
    """Return a sentence about a key of another project; "" for a key that none of them has.

    >>> of_key("data.train_batch_size")
    "'data.train_batch_size' is a key of verl: here it is `rollout.prompts` (global there, ...). ..."
    """
    name = given.lstrip("+~")
    near = next(_found(name), None) is None and get_close_matches(name, _undotted(), n=1, cutoff=0.85)
    name = near[0] if near else name
    project, row = next(_found(name), ("", None))
    if row is None or row.ours.startswith(f"`{name}`"):
        return ""
    here = f"here it is {row}" if row.ours else f"it has no counterpart: {row.note}"
    what = f"{given!r} is unknown. Did you mean {name!r}? It" if near else f"{given!r}"
    return f"{what} is a key of {project}: {here}. `rl4llm import FILE` converts a whole configuration."


def _undotted() -> list[str]:
    """Return the keys without a section of all projects."""
    projects = [*PROJECTS, *of_trl("grpo", "dpo", "sft")]
    names = [key.removeprefix("method.") for project in projects for key in project.rows]
    return [name for name in dict.fromkeys(names) if name.replace("_", "").isalnum()]


def _found(name: str) -> Iterator[tuple[str, Row]]:
    """Yield projects that have a key: the whole one, or its last part if our key for it is in the section that was given."""
    section, _, last = name.rpartition(".")
    whole = [(project, [*project.prepare({name: None})][-1]) for project in PROJECTS]
    words = [(project, last) for project in of_trl("grpo", "dpo", "sft")]
    words.append((ORIGINAL, f"method.{last}"))
    for project, candidate in (*(whole if section else ()), *words, *whole):
        row = project.row(candidate)
        if row and ((project, candidate) in whole or not section or f"`{section}." in row.ours):
            yield project.name, row
