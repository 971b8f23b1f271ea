"""Find rows that do not fit the model's context before a run, and refuse them or leave them out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl4llm.core.errors import DataError, TemplateError
from rl4llm.data.load import OR_SKIP, Rows

ORIGINAL = "original_max_position_embeddings"
SHOWN = 5  # rows that a message lists
PATIENCE = 256  # after this number of consecutive rows that fit, longest text first, the rest is not read


def context_limits(config: Any) -> list[tuple[int, str]]:
    """Return the most tokens of a row that a model's config allows, each with the key that sets it.

    A rope of the type longrope ends at its original length: behind it the factors of all rows in a pass change, so the
    loss of a row would depend on its neighbours, and a cache would mix both.
    """
    text = config.get_text_config()
    limits = [(getattr(text, "max_position_embeddings", None), "max_position_embeddings")]
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in (rope, *(item for item in rope.values() if isinstance(item, Mapping))):  # by kind of layer
        if part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            limits.append((original or getattr(text, ORIGINAL, None), ORIGINAL))
    return [(length, reason) for length, reason in limits if length]


def unfit(
    numbers: Iterable[int],
    length: Callable[[int], int | None],
    limit: int,
    *,
    skip: bool,
    patience: int | None = None,
) -> dict[int, str]:
    """Return why rows cannot be rendered or have more than `limit` tokens, by row number.

    Args:
        numbers: row numbers, in the order in which the rows are checked.
        length: returns the number of tokens of a row, or None if the row is known to fit.
        limit: the most tokens that a row may have.
        skip: check the rows behind the first fault too.
        patience: stop after this number of consecutive rows that fit; None checks all.
    """
    faults: dict[int, str] = {}
    fitting = 0
    for number in numbers:
        try:
            tokens = length(number) or 0
        except (DataError, TemplateError) as error:
            faults[number] = str(error)
        else:
            if tokens > limit:
                faults[number] = f"it has {tokens} tokens, and the context has room for {limit}."
        fitting = 0 if number in faults else fitting + 1
        if fitting == patience or (faults and not skip):
            break
    return faults


def usable_rows(rows: Any, faults: Mapping[int, str], *, skip: bool) -> Any:
    """Return the rows without a fault; `skipped` then lists the others, by `faults`, which row number maps to a reason.

    Raises DataError, with the place of the row, for the first fault; with `skip` only if no row is left.
    """
    if not faults:
        return rows
    reasons = [f"{place(rows, number)}: {fault}" for number, fault in faults.items()]
    if not skip or len(faults) == len(rows):
        raise DataError(
            f"each row has a fault; the first: {reasons[0]}" if skip else f"{reasons[0]} {OR_SKIP}"
        )
    usable = rows_without(rows, faults)
    return replace(usable, skipped=(*usable.skipped, *reasons)) if isinstance(usable, Rows) else usable


def rows_without(rows: Any, left_out: Container[int]) -> Any:
    """Return a dataset without the rows of these numbers, in the same order."""
    numbers = [number for number in range(len(rows)) if number not in left_out]
    if not isinstance(rows, Rows):
        return [rows[number] for number in numbers]
    places = tuple(rows.places[number] for number in numbers if rows.places)
    return replace(rows, rows=tuple(rows.rows[number] for number in numbers), places=places)


def dropped(rows: Sequence[Any], kept: Sequence[Any], where: str) -> list[str]:
    """Return a warning about the rows that were left out, in a list that is empty if there are no such rows."""
    total = len(rows) + len(rows.skipped if isinstance(rows, Rows) else ())
    reasons = kept.skipped if isinstance(kept, Rows) else ()
    count = len(reasons) if isinstance(kept, Rows) else total - len(kept)
    example = f" The first: {reasons[0]}" if reasons else ""
    return [f"{where}: {count} of {total} rows were skipped (data.bad_rows=skip).{example}"] if count else []


def place(rows: Any, number: int) -> str:
    """Return where a row is stored, and its name."""
    name = str(rows[number].get("prompt_id", number))
    return (
        f"{rows.places[number]} (prompt {name!r})"
        if isinstance(rows, Rows) and rows.places
        else f"prompt {name!r}"
    )
