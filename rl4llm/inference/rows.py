"""Who sits where in the cache: decoding requests in front without a gap, parked sessions behind, shared prompts beside."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rl4llm.core.types import SamplingParams
from rl4llm.inference.kv_cache import KVCache
from rl4llm.inference.stops import Rule


@dataclass(slots=True, eq=False)
class Request:
    """One completion that is asked for; `token_ids` holds the prompt and all that was sampled so far."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str
    max_tokens: int
    rule: Rule
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    version: int | None = None
    cancelled: bool = False

    @property
    def sampled(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.logprobs)


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt without its last token, cached once for a group. Rows read it in place, or copy it (not `in_place`)."""

    token_ids: tuple[int, ...]
    slot: int
    in_place: bool


@dataclass(slots=True, eq=False)
class Row:
    """A row of the cache that is in use: by a request, or by a parked session whose tokens are `cached_ids`."""

    request: Request  # of a parked session the last one
    prefix: Prefix | None = None
    session: str = ""
    cached_ids: Sequence[int] = ()
    slot: int = -1
    last_used: int = 0

    @property
    def base(self) -> int:
        """How many of the first tokens lie in the prefix and not in the row."""
        return len(self.prefix.token_ids) if self.prefix and self.prefix.in_place else 0

    @property
    def cached(self) -> int:
        """How many tokens the cache holds: all but the last, which is fed next or never was."""
        return len(self.request.token_ids) - 1

    def reusable(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens of a sequence this row's cache already holds; 0 if not even its prefix fits."""
        most = min(len(self.cached_ids), len(token_ids))
        if self.cached_ids[:most] != token_ids[:most]:
            most = next(place for place in range(most) if self.cached_ids[place] != token_ids[place])
        return most if most >= self.base else 0


class RowTable:
    """Gives rows their slots and moves cached tokens along when a row has to move."""

    def __init__(self, cache: KVCache, max_rows: int):
        self._cache, self._max_rows = cache, max_rows
        self.active: list[Row] = []
        self.parked: list[Row] = []

    @property
    def free(self) -> int:
        """How many more requests can decode."""
        return self._max_rows - len(self.active)

    def take(self, session: str) -> Row | None:
        """Remove and return the parked row of a session."""
        row = next((row for row in self.parked if row.session == session), None) if session else None
        if row is not None:
            self.parked.remove(row)
        return row

    def release(self, session: str) -> None:
        """Forget a session's parked row."""
        self.parked = [row for row in self.parked if row.session != session]

    def admit(self, newcomers: Sequence[Row]) -> int:
        """Let rows decode, in neighbouring slots in this order; returns how many parked sessions had to go."""
        evicted = max(0, len(self.active) + len(newcomers) + len(self.parked) - self._max_rows)
        self.parked.sort(key=lambda row: (row.last_used, row.session))
        del self.parked[:evicted]
        moves = [(row, len(self.active) + place) for place, row in enumerate(newcomers)]
        self.active.extend(newcomers)
        self._move(moves)
        return evicted

    def leave(self, leaving: Sequence[Row]) -> None:
        """Rows stop decoding; those with a session are parked, the last ones take the places of the others."""
        gone = set(map(id, leaving))
        self.active = [row for row in self.active if id(row) not in gone]
        for row in leaving:
            if row.session:
                self.release(row.session)
                self.parked.append(row)
        holes = _free(row.slot for row in self.active)
        self._move([(row, next(holes)) for row in self.active if row.slot >= len(self.active)])

    def clear(self) -> None:
        """Forget all rows and their cache."""
        self.active, self.parked = [], []
        self._cache.drop()

    def _move(self, moves: list[tuple[Row, int]]) -> None:
        """Put rows at their targets; parked rows that stand in the way go to the first free slots behind."""
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
    """The shared prompts, each kept for as long as a row has it."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._prefixes: dict[tuple[int, ...], Prefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def sweep(self, rows: Iterable[Row]) -> None:
        """Forget prompts that no row has any more."""
        live = {row.prefix.token_ids for row in rows if row.prefix}
        self._prefixes = {ids: prefix for ids, prefix in self._prefixes.items() if ids in live}

    def find(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """The prefix with these tokens."""
        return self._prefixes.get(token_ids)

    def add(self, token_ids: tuple[int, ...], in_place: bool) -> Prefix:
        """Give a prefix a slot; its tokens are still to be computed."""
        slot = next(_free(prefix.slot for prefix in self._prefixes.values()))
        self._cache.reserve(slot + 1, len(token_ids))
        self._prefixes[token_ids] = Prefix(token_ids, slot, in_place)
        return self._prefixes[token_ids]

    def clear(self) -> None:
        """Forget all prompts and their cache."""
        self._prefixes = {}
        self._cache.drop()


def _free(taken: Iterable[int], start: int = 0) -> Iterator[int]:
    return itertools.filterfalse(set(taken).__contains__, itertools.count(start))
