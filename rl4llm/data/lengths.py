"""Find rows that do not fit the model's context before a run, and refuse them or leave them out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl4llm.core.errors import DataError
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


def too_long(
    numbers: Iterable[int], length: Callable[[int], int | None], limit: int, patience: int | None = None
) -> dict[int, int]:
    """Return the number of tokens of each row with more than `limit` tokens, by row number.

    Args:
        numbers: row numbers, in the order in which the rows are checked.
        length: returns the number of tokens of a row, or None if the row is known to fit.
        patience: stop after this number of consecutive rows that fit; None checks all.
    """
    found: dict[int, int] = {}
    fitting = 0
    for number in numbers:
        tokens = length(number)
        fitting = fitting + 1 if tokens is None or tokens <= limit else 0
        if tokens is not None and tokens > limit:
            found[number] = tokens
        if fitting == patience:
            break
    return found


def fitting_rows(rows: Any, long: Mapping[int, int], *, drop: bool, where: str, limit: int) -> Any:
    """Return the rows that are not too `long`; raises DataError for long rows unless `drop` is set.

    Args:
        rows: a dataset; the order of its rows is kept.
        long: the number of tokens of each row that is too long, by row number.
        drop: leave long rows out instead of raising; not if all rows are too long.
        where: what the rows are for, "data" or "eval".
        limit: the most tokens that a row may have.
    """
    if not long:
        return rows
    if not drop or len(long) == len(rows):
        shown = "; ".join(
            f"{place(rows, number)} has {long[number]} tokens" for number in sorted(long)[:SHOWN]
        )
        more = f"; and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        out = ", or set data.bad_rows=skip to leave them out" if len(long) < len(rows) else ""
        raise DataError(
            f"{where}: {len(long)} of {len(rows)} rows are too long: {shown}{more}. The context has room for {limit} "
            f"tokens. Shorten or remove these rows{out}."
        )
    return rows_without(rows, long)


def usable_rows(rows: Any, faults: Mapping[int, str], *, skip: bool) -> Any:
    """Return the rows without a fault; `skipped` then lists the others, by `faults`, which row number maps to a reason.

    Raises DataError, with the place of the row, for the first fault; with `skip` only if no row is left.
    """
    if not faults:
        return rows
    reasons = [f"{place(rows, number)}: {fault}" for number, fault in faults.items()]
    if not skip or len(faults) == len(rows):
        raise DataError(f"{reasons[0]} {OR_SKIP}")
    kept = rows_without(rows, faults)
    return replace(kept, skipped=(*kept.skipped, *reasons)) if isinstance(kept, Rows) else kept


def rows_without(rows: Any, left_out: Container[int]) -> Any:
    """Return a dataset without the rows of these numbers, in the same order."""
    numbers = [number for number in range(len(rows)) if number not in left_out]
    if not isinstance(rows, Rows):
        return [rows[number] for number in numbers]
    places = tuple(rows.places[number] for number in numbers if rows.places)
    return replace(rows, rows=tuple(rows.rows[number] for number in numbers), places=places)


def dropped(rows: Sequence[Any], kept: Sequence[Any], where: str) -> list[str]:
    """Return warnings about the rows that were left out, as a list that is empty if there are no such rows."""
    before = rows.skipped if isinstance(rows, Rows) else ()
    bad = kept.skipped if isinstance(kept, Rows) else before
    usable = len(rows) + len(before) - len(bad)
    found = []
    if bad:
        found.append(
            f"{where}: {len(bad)} of {usable + len(bad)} rows were skipped (data.bad_rows=skip). The first: {bad[0]}"
        )
    if (count := usable - len(kept)) > 0:  # texts are cut into more rows
        found.append(
            f"{where}: {count} of {usable} rows are too long and were left out (data.bad_rows=skip)."
        )
    return found


def place(rows: Any, number: int) -> str:
    """Return where a row is stored, and its name."""
    name = str(rows[number].get("prompt_id", number))
    return (
        f"{rows.places[number]} (prompt {name!r})"
        if isinstance(rows, Rows) and rows.places
        else f"prompt {name!r}"
    )
