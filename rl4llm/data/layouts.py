"""Place tokens in a batch: three layouts of the same tokens, with the same loss and gradient.

- ``sorted``: one trajectory per row, rows of similar length together, padded on the right.
- ``packed``: rows filled with several trajectories, no padding.
- ``shared``: like packed, but with prefix sharing: the prompt of a group is stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl4llm.core.registry import Registry

Ints = NDArray[np.int64]
NEVER = -1


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a layout needs of each trajectory: its number of tokens, that of its prompt, and its group."""

    lengths: Ints
    prompt_lengths: Ints
    groups: Ints

    @property
    def starts(self) -> Ints:
        """Return the start of each trajectory among the flat tokens."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of flat tokens and their places, one entry per run.

    `source` and `length` define the run; it begins at (`batch`, `row`, `column`) as `segment` of its row, with `position`
    as the first position id and `previous` as the column of the token before it.
    """

    source: Ints
    length: Ints
    batch: Ints
    row: Ints
    column: Ints
    segment: Ints
    position: Ints
    previous: Ints

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
    return Pieces(flat.starts[order], flat.lengths[order], batch, row, zeros, zeros + 1, zeros, zeros + NEVER)


@LAYOUTS.register("packed")
def _packed_rows(flat: Lengths, budget: int) -> Pieces:
    batch = first_fit(flat.lengths, budget)
    zeros = np.zeros(len(batch), np.int64)
    column, segment = _line_up(flat.lengths, batch)
    return Pieces(flat.starts, flat.lengths, batch, zeros, column, segment, zeros, zeros + NEVER)


@LAYOUTS.register("shared")
def _shared_prompts(flat: Lengths, budget: int) -> Pieces:
    """Pack units: a prompt, written once, and as many of its trajectories as the budget holds."""
    starts = flat.starts
    runs: list[tuple[int, ...]] = []  # source, length, unit, and the number of the run that holds its prompt
    for number, members in enumerate(_units(flat, budget)):
        head, prompt_tokens = NEVER, 0
        if len(members) > 1:  # a trajectory that is alone needs no segment for its prompt
            head, prompt_tokens = len(runs), flat.prompt_lengths[members[0]]
            runs.append((starts[members[0]], prompt_tokens, number, NEVER))
        runs += [(starts[i] + prompt_tokens, flat.lengths[i] - prompt_tokens, number, head) for i in members]
    source, length, unit, prompt = np.array(runs, np.int64).T
    batch = first_fit(np.bincount(unit, weights=length).astype(np.int64), budget)[unit]
    column, segment = _line_up(length, batch)
    position = np.where(prompt == NEVER, 0, length[prompt])
    previous = np.where(prompt == NEVER, NEVER, (column + length)[prompt] - 1)
    return Pieces(source, length, batch, np.zeros_like(batch), column, segment, position, previous)


def _units(flat: Lengths, budget: int) -> list[list[int]]:
    """Return the trajectories of each unit: those of a group, cut where their tokens exceed the budget."""
    units: list[list[int]] = []
    group, used = None, 0
    suffixes = flat.lengths - flat.prompt_lengths
    for i in np.lexsort((-suffixes, flat.groups)):
        if flat.groups[i] != group or used + suffixes[i] > budget:
            group, used = flat.groups[i], flat.prompt_lengths[i]
            units.append([])
        used += suffixes[i]
        units[-1].append(i)
    return [sorted(unit) for unit in units]


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
