"""Place tokens in a batch: three layouts of the same tokens, with the same loss and gradient.

- ``sorted``: one record per row, rows of similar length together, padded on the right.
- ``packed``: rows filled with several records, no padding.
- ``shared``: like packed, but with prefix sharing: tokens with which several records of a group begin are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl4llm.core.registry import Registry

Ints = NDArray[np.int64]
NEVER = -1

SHORTEST = 32
"""Records that share fewer tokens than this, beyond what more records share, compute these tokens again: each place where
records part is one more call of attention in each layer. On a CPU it takes as long as 8 tokens of a model of 1 million
parameters; a GPU needs more to be busy."""

KEY = 1 / 16
"""Memory that a copied key and its value take beside a computed token. With one head of keys for 4, 2 or 1 of queries it was
measured as 0.03, 0.05 and 0.08 in an update. Attention of a segment copies the keys of all tokens before it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a layout needs of each record: its number of tokens, and how many of them other records share.

    `openings` counts the tokens before the policy's first. `order` lists the records depth-first through their tries, and
    shared[i] is the number of tokens with which order[i] begins like order[i - 1]; 0 for the first of a group.
    """

    lengths: Ints
    openings: Ints
    order: Ints
    shared: Ints

    @property
    def starts(self) -> Ints:
        """Return the start of each record among the flat tokens."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True)
class Pieces:
    """Records and their places, one entry per record.

    The first `shared` tokens of a record are those of the piece before it, which is in the same row. Its first `position`
    tokens have no place, since nothing of them trains here. The other `length` are the flat tokens from `source` on, and
    begin at (`batch`, `row`, `column`) as `segment` of their row.
    """

    source: Ints
    length: Ints
    batch: Ints
    row: Ints
    column: Ints
    segment: Ints
    position: Ints
    shared: Ints

    def by_batch(self) -> list[Pieces]:
        """Return the pieces of each micro-batch."""
        order = np.argsort(self.batch, kind="stable")
        cuts = np.flatnonzero(np.diff(self.batch[order])) + 1
        names = self.__slots__
        return [Pieces(*(getattr(self, name)[chosen] for name in names)) for chosen in np.split(order, cuts)]


Layout = Callable[[Lengths, int], Pieces]
LAYOUTS: Registry[Layout] = Registry("training.layout")


@LAYOUTS.register("sorted")
def _sorted_rows(flat: Lengths, budget: int) -> Pieces:
    order = np.argsort(-flat.lengths, kind="stable")
    batch, row, zeros = np.zeros((3, len(order)), np.int64)
    start = number = 0
    while start < len(order):
        stop = min(len(order), start + budget // int(flat.lengths[order[start]]))
        batch[start:stop] = number
        row[start:stop] = np.arange(stop - start)
        start, number = stop, number + 1
    return Pieces(flat.starts[order], flat.lengths[order], batch, row, zeros, zeros + 1, zeros, zeros)


@LAYOUTS.register("packed")
def _packed_rows(flat: Lengths, budget: int) -> Pieces:
    batch = first_fit(flat.lengths, budget)
    zeros = np.zeros(len(batch), np.int64)
    column, segment = _line_up(flat.lengths, batch)
    return Pieces(flat.starts, flat.lengths, batch, zeros, column, segment, zeros, zeros)


@LAYOUTS.register("shared")
def _shared_prefixes(flat: Lengths, budget: int) -> Pieces:
    """Pack units: records that follow each other in depth-first order, cut where they share nothing or exceed the budget.

    What a whole group shares costs nothing more, and where some of its records part, each copied key costs KEY tokens.
    """
    length, shared = flat.lengths[flat.order], flat.shared.copy()
    group = np.cumsum(shared == 0) - 1
    root = np.full(len(length), length.max())  # what all records of a group share
    np.minimum.at(root, group[shared > 0], shared[shared > 0])
    unit, cost = np.zeros_like(length), length - shared
    number, total, forks = NEVER, 0, [0]
    for place, depth in enumerate(shared.tolist()):
        while forks[-1] > depth:
            forks.pop()
        if depth > (free := int(root[group[place]])):  # the first that leaves a record there cuts it in two
            cost[place] += math.ceil(KEY * (depth * (1 + (forks[-1] < depth)) - free))
        total += cost[place]
        if depth == 0 or total > budget:
            number, shared[place], cost[place], forks = number + 1, 0, length[place], [0]
            total = cost[place]
        elif forks[-1] < depth:
            forks.append(depth)
        unit[place] = number
    batch = first_fit(np.bincount(unit, weights=cost).astype(np.int64), budget)[unit]
    # A record's place begins with the token before the first one that it computes or trains.
    position = (np.minimum(shared, flat.openings[flat.order]) - 1).clip(0)
    column, segment = _line_up(length - position, batch)
    row, source = np.zeros_like(batch), flat.starts[flat.order] + position
    return Pieces(source, length - position, batch, row, column, segment, position, shared)


def depth_first(records: Sequence[Ints], groups: Ints) -> tuple[Ints, Ints]:
    """Return the depth-first order of the trie of each group, and how many tokens each record shares with the one before.

    Sorted records are a trie in depth-first order, and two of them share the least of what neighbours between them share.

    >>> depth_first([np.array([5, 6, 7]), np.array([5, 8]), np.array([5, 6])], np.array([0, 0, 0]))
    (array([2, 0, 1]), array([0, 2, 1]))
    """
    keys = [record.astype(">i8").tobytes() for record in records]  # bytes are compared faster than numbers
    order = sorted(range(len(records)), key=lambda i: (groups[i], keys[i]))
    shared = np.zeros(len(order), np.int64)
    for place, (one, other) in enumerate(pairwise(order), 1):
        if groups[one] == groups[other]:
            length = min(len(records[one]), len(records[other]))
            differ = records[one][:length] != records[other][:length]
            shared[place] = differ.argmax() if differ.any() else length
    return np.array(order, np.int64), shared


def without_short(shared: Ints, groups: Ints) -> Ints:
    """Return the tokens that are worth sharing, from those of `depth_first`; what a whole group shares always is."""
    worth = shared.copy()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)[1:]
        depths: list[int] = []
        for depth in np.unique(shared[members]):
            if not depths or depth - depths[-1] >= SHORTEST:
                depths.append(depth)
        if depths:
            worth[members] = np.array(depths)[np.searchsorted(depths, shared[members], side="right") - 1]
    return worth


def first_fit(sizes: Ints, budget: int) -> Ints:
    """Return the bin of each item by first-fit decreasing; bins are numbered as they open."""
    bins, room, opened = np.zeros(len(sizes), np.int64), np.full(len(sizes), budget), 1
    for i in np.argsort(-sizes, kind="stable"):
        chosen = int(np.argmax(room[:opened] >= sizes[i]))
        if room[chosen] < sizes[i]:
            chosen, opened = opened, opened + 1
        room[chosen] -= sizes[i]
        bins[i] = chosen
    return bins


def _line_up(length: Ints, batch: Ints) -> tuple[Ints, Ints]:
    """Return column and segment number of each run if the runs of a batch form one row, in the given order."""
    order = np.argsort(batch, kind="stable")
    ends = np.cumsum(length[order])
    opens = np.r_[True, np.diff(batch[order]) != 0]
    group = np.cumsum(opens) - 1
    starts = np.flatnonzero(opens)
    column, segment = np.empty_like(length), np.empty_like(length)
    column[order] = ends - length[order] - (ends - length[order])[starts][group]
    segment[order] = np.arange(len(order)) - starts[group] + 1
    return column, segment
