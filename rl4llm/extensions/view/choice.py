"""Which episodes of a run one file keeps: those of its story, the extremes, and some of each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rl4llm.extensions.view.index import COLUMNS

FILE, PROMPT, ROLE, REWARD = (COLUMNS.index(name) for name in ("file", "prompt", "role", "reward"))


def choose(rows: Sequence[Sequence[Any]], wanted: Iterable[int], most: int) -> Iterator[int]:
    """Yield at most `most` numbers of rows: `wanted`, the extremes, then a group of every file in turn.

    Groups whose rewards differ come first. With fewer places than files, the files are spread over the run.
    """
    taken: dict[int, None] = {}
    for number in [*wanted, *_extremes(rows), *_spread(rows)]:
        if len(taken) >= most:
            break
        if number not in taken:
            taken[number] = None
            yield number


def _extremes(rows: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Yield the highest and the lowest of each of these columns, and a failure."""
    for name in ("reward", "tokens", "turns", "mismatch"):
        place = COLUMNS.index(name)
        numbers = [number for number, row in enumerate(rows) if isinstance(row[place], int | float)]
        ordered = sorted(numbers, key=lambda number: rows[number][place])
        yield from ordered[-1:] + ordered[:1]
    yield from [number for number, row in enumerate(rows) if row[COLUMNS.index("failure")]][:1]


def _spread(rows: Sequence[Sequence[Any]]) -> Iterator[int]:
    groups: dict[Any, dict[tuple[Any, Any], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rows):
        groups[row[FILE]][(row[PROMPT], row[ROLE])].append(number)
    by_step = sorted(groups, key=lambda file: (rows[_first(groups[file])][COLUMNS.index("step")] or 0, file))
    ordered = [
        sorted(groups[file].values(), key=lambda own: len({rows[number][REWARD] for number in own}) == 1)
        for file in _halving(by_step)
    ]
    for turn in range(max(map(len, ordered), default=0)):
        for own in ordered:
            if turn < len(own):
                yield from own[turn]


def _first(own: dict[tuple[Any, Any], list[int]]) -> int:
    return next(iter(own.values()))[0]


def _halving(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the last, the first, the middle, the middles of the halves, and so on.

    >>> list(_halving([1, 2, 3, 4, 5]))
    [5, 1, 3, 2, 4]
    """
    ends = [len(items) - 1, 0] if len(items) > 1 else [*range(len(items))]
    yield from (items[at] for at in ends)
    spans = [(0, len(items) - 1)]
    for low, high in spans:
        if high - low > 1:
            middle = (low + high) // 2
            yield items[middle]
            spans += [(low, middle), (middle, high)]
