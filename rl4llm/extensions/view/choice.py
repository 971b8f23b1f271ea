"""Which episodes of a run one file keeps: those of its story, the extremes, and groups of each step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from rl4llm.extensions.view.index import COLUMNS

FILE, PROMPT, ROLE, REWARD = (COLUMNS.index(name) for name in ("file", "prompt", "role", "reward"))


def choose(rows: Sequence[Sequence[Any]], cards: Iterable[int], most: int) -> Iterator[int]:
    """Yield at most `most` numbers of rows: the `cards` of the story, the extremes, then a group of every file in turn.

    Groups whose rewards differ come first. Files come in a random order, so that fewer places than files are spread.
    """
    files: dict[Any, dict[tuple[Any, Any], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rows):
        files[row[FILE]][(row[PROMPT], row[ROLE])].append(number)
    listed = [
        sorted(groups.values(), key=lambda group: len({rows[number][REWARD] for number in group}) == 1)
        for groups in files.values()
    ]
    random.Random(0).shuffle(listed)
    in_turn = chain.from_iterable(group for turn in zip_longest(*listed) for group in turn if group)
    yield from islice(dict.fromkeys(chain(cards, _extremes(rows), in_turn)), max(0, most))


def _extremes(rows: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Yield the highest and the lowest of each of these columns, and a failure."""
    for name in ("reward", "tokens", "turns", "mismatch"):
        place = COLUMNS.index(name)
        numbers = [number for number, row in enumerate(rows) if isinstance(row[place], int | float)]
        ordered = sorted(numbers, key=lambda number: rows[number][place])
        yield from ordered[-1:] + ordered[:1]
    yield from [number for number, row in enumerate(rows) if row[COLUMNS.index("failure")]][:1]
