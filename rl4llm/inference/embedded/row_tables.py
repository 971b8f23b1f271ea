"""Which rows of the cache are whose: rows that decode or wait for a session's next turn, and prompts that rows share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from rl4llm.inference.embedded.kv_cache import KVCache, SharedPrefix
from rl4llm.inference.embedded.rows import BusyRow, Prefix


class RowTable:
    """Assigns slots to rows, and moves cached tokens when a row has to move."""

    def __init__(self, cache: KVCache, max_rows: int):
        self._cache, self._max_rows = cache, max_rows
        self.active: list[BusyRow] = []
        self.parked: list[BusyRow] = []

    @property
    def free(self) -> int:
        """Return how many more requests can decode."""
        return self._max_rows - len(self.active)

    def take(self, session: str) -> BusyRow | None:
        """Remove and return the parked row of a session."""
        row = next((row for row in self.parked if row.session == session), None) if session else None
        if row is not None:
            self.parked.remove(row)
        return row

    def release(self, session: str) -> None:
        """Forget a session's parked row."""
        self.parked = [row for row in self.parked if row.session != session]

    def admit(self, newcomers: Sequence[BusyRow]) -> int:
        """Let rows decode, in neighbouring slots in this order; return how many parked sessions were evicted."""
        evicted = max(0, len(self.active) + len(newcomers) + len(self.parked) - self._max_rows)
        self.parked.sort(key=lambda row: (row.last_used, row.session))
        del self.parked[:evicted]
        moves = [(row, len(self.active) + place) for place, row in enumerate(newcomers)]
        self.active.extend(newcomers)
        self._move(moves)
        return evicted

    def leave(self, leaving: Sequence[BusyRow]) -> None:
        """Stop decoding rows: park those with a session, and move the last rows into the gaps."""
        gone = set(map(id, leaving))
        self.active = [row for row in self.active if id(row) not in gone]
        for row in leaving:
            row.over = False
            if row.session:
                self.release(row.session)
                self.parked.append(row)
        holes = _free(row.slot for row in self.active)
        self._move([(row, next(holes)) for row in self.active if row.slot >= len(self.active)])

    def clear(self) -> None:
        self.active, self.parked = [], []
        self._cache.drop()

    def _move(self, moves: list[tuple[BusyRow, int]]) -> None:
        """Move rows to their targets; parked rows in the way move to the first free slots behind."""
        count = len(self.active)
        free = _free((row.slot for row in self.parked), start=count)
        moves = moves + [(row, next(free)) for row in self.parked if row.slot < count]
        self._cache.reserve(max([count, *(target + 1 for _, target in moves)]), 0)
        real = [(row, target) for row, target in moves if 0 <= row.slot != target]
        longest = max((row.cached - row.base for row, _ in real), default=0)
        self._cache.copy(self._cache, [(row.slot, target) for row, target in real], longest)
        for row, target in moves:
            row.slot = target
        self.active.sort(key=lambda row: row.slot)


class PrefixTable:
    """The shared prompts, each kept while a row uses it."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._prefixes: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def sweep(self, rows: Iterable[BusyRow]) -> None:
        """Forget prompts that no row uses."""
        live = {row.prefix for row in rows}
        self._prefixes = [prefix for prefix in self._prefixes if prefix in live]

    def outdate(self) -> None:
        """Find none of the present prefixes any more, since the weights change."""
        for prefix in self._prefixes:
            prefix.outdated = True

    def find(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """Return the prefix with these tokens; None if there is none."""
        current = (prefix for prefix in self._prefixes if not prefix.outdated)
        return next((prefix for prefix in current if prefix.token_ids == token_ids), None)

    def add(self, token_ids: tuple[int, ...], in_place: bool) -> Prefix:
        """Assign a slot to a new prefix, whose tokens the caller computes."""
        slot = next(_free(prefix.slot for prefix in self._prefixes))
        self._cache.reserve(slot + 1, len(token_ids))
        prefix = Prefix(token_ids, slot, in_place)
        self._prefixes.append(prefix)
        return prefix

    def clear(self) -> None:
        """Forget all prompts and their cache."""
        self._prefixes = []
        self._cache.drop()


def shared_prefix(rows: Sequence[BusyRow], device: torch.device) -> SharedPrefix | None:
    """Return how these rows read their prompts in place; None if no row does."""
    bases = [row.base for row in rows]
    if not any(bases):
        return None
    return SharedPrefix([row.prefix.slot if row.prefix and row.base else None for row in rows], bases, device)


def _free(taken: Iterable[int], start: int = 0) -> Iterator[int]:
    return itertools.filterfalse(set(taken).__contains__, itertools.count(start))
