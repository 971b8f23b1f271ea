"""What rl4llm calls the keys of other projects."""

from __future__ import annotations

from collections.abc import Iterator

from rl4llm.core.registry import missing_extension
from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.projects import PROJECTS, TRL, trl
from rl4llm.extensions.migration.row import Row
from rl4llm.extensions.migration.small import MRL


def of_key(given: str) -> str:
    """Return a sentence about a key of another project; "" for a key that none of them has.

    >>> of_key("data.train_batch_size")
    "'data.train_batch_size' is a key of verl: here it is `rollout.prompts` (global there, ...). ..."
    """
    project, row = next(_found(given.lstrip("+~")), ("", None))
    if row is None or row.ours.startswith(f"`{given}`"):
        return ""
    here = f"here it is {row}" if row.ours else f"it has no counterpart: {row.note}"
    return f"{given!r} is a key of {project}: {here}. `rl4llm import FILE` converts a whole configuration."


def _found(name: str) -> Iterator[tuple[str, Row]]:
    """Yield projects that have a key: first those with the whole key, then those with its last part."""
    last = name.rpartition(".")[2]
    places = [(project, [*project.prepare({name: None})][-1]) for project in PROJECTS if "." in name]
    if missing_extension(f"{TRL}.table") is None:
        places += [(trl(algorithm), last) for algorithm in ("grpo", "dpo", "sft")]
    places += [(MRL, name), (ORIGINAL, f"method.{last}"), *((project, name) for project in PROJECTS)]
    for project, candidate in places:
        if row := project.row(candidate):
            yield project.name, row
