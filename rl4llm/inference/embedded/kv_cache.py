"""The static key-value cache: one slab per layer, decoding rows in front, and a window with what a pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.images import Image
from rl4llm.core.model_memory import ModelShape

LENGTH_STEP = 64  # capacity grows in multiples of this many tokens
PADDING = 512  # positions that rows of a part may attend to without need: reading them costs about as much as another part
# Of a captured step: kernels that are compiled for any number of rows are compiled again for one.
LEAST_ROWS = 2
StateName = tuple[int, str, int]
"""The layer, the kind and the number of a recurrent state."""


def padded_rows(rows: int) -> int:
    """Return the rows of a captured step that decodes `rows` rows: a power of two, so that few steps are captured."""
    return 1 << max(rows - 1, LEAST_ROWS - 1).bit_length()


class KVCache:
    """Keys and values of all layers: slabs of shape (rows, heads, capacity, D), allocated and grown on demand.

    `states` are those of recurrent layers, (rows, ...), by layer, kind and number. A row has one of each, after its last
    token. Unused places hold zeros or old finite values, never garbage: a masked weight of 0 times NaN would be
    NaN. `prefixes` is the cache of prompts that several rows of this one share. Behind the rows there are `spare` ones for
    padding. `placed` counts how often slabs got another place in memory.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, prefixes: KVCache | None = None, spare: int = 0
    ):
        self.dtype, self.device, self.prefixes, self._spare = dtype, device, prefixes, spare
        self.rows = self.capacity = self.placed = 0
        self.window: Any = None  # a Window, what the current pass computes; set before each pass
        self._keys: dict[int, Tensor] = {}  # slabs by layer
        self._values: dict[int, Tensor] = {}
        self.states: dict[StateName, Tensor] = {}

    @staticmethod
    def memory(shape: ModelShape, rows: int, length: int, number: int) -> int:
        """Return the bytes of all slabs for `rows` rows of `length` tokens, with `number` bytes per number."""
        return rows * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * number

    @property
    def num_bytes(self) -> int:
        caches = (self._keys, self._values, self.states)
        return sum(slab.numel() * slab.element_size() for slabs in caches for slab in slabs.values())

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens, and keep the content."""
        if length > self.capacity:
            length = -(-max(length, self.capacity * 3 // 2) // LENGTH_STEP) * LENGTH_STEP
        rows, length = max(rows, self.rows), max(length, self.capacity)
        if (rows, length) == (self.rows, self.capacity):
            return
        before, self.rows, self.capacity = (self.rows, self.capacity), rows, length
        self._resize(*before)
        for name, states in self.states.items():
            self.states[name] = torch.cat([states, states.new_zeros(rows - len(states), *states.shape[1:])])
        self.placed += 1

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the window's new keys and values, (B, heads, S, D); return all that its rows may attend to."""
        return self._update(self._keys, layer, keys), self._update(self._values, layer, values)

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first rows and positions."""
        return self._keys[layer][:rows, :, :length], self._values[layer][:rows, :, :length]

    def copy(self, source: KVCache, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the states and the first `length` positions of rows of a cache to rows of this one; or permute its rows."""
        if not pairs:
            return
        source_rows, target_rows = torch.tensor(pairs, device=self.device).unbind(1)
        for slabs, theirs in ((self._keys, source._keys), (self._values, source._values)):
            for layer, slab in theirs.items():
                used = slab[:, :, :length].index_select(0, source_rows)
                self._slab(slabs, layer, used)[:, :, :length].index_copy_(0, target_rows, used)
        for name, states in source.states.items():
            self.states_like(name, states).index_copy_(0, target_rows, states.index_select(0, source_rows))

    def states_like(self, name: StateName, states: Tensor) -> Tensor:
        """Return the states of a recurrent layer in all rows; make them, of zeros, in the form of `states` (B, ...)."""
        if name not in self.states:
            self.states[name] = states.new_zeros(self.rows, *states.shape[1:])
        return self.states[name]

    def drop(self) -> None:
        """Free the memory."""
        self.rows = self.capacity = 0
        self.placed += 1
        self.window = None
        self._keys, self._values, self.states = {}, {}, {}

    def _resize(self, rows: int, length: int) -> None:
        """Make slabs of the present size, and keep what the first `rows` rows hold at the first `length` positions."""
        for slabs in (self._keys, self._values):
            for layer in list(slabs):  # one at a time: never the whole cache twice
                old = slabs.pop(layer)
                self._slab(slabs, layer, old)[:rows, :, :length] = old[:rows]

    def _update(self, slabs: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        window = self.window
        slab = self._slab(slabs, layer, new)
        rows = slice(window.first, window.first + window.rows)
        if window.fresh:
            slab[rows, :, : window.count] = new
            return new
        slab.view(-1, slab.shape[3]).index_copy_(
            0, window.index(slab.shape[1]), new.reshape(-1, slab.shape[3])
        )
        return slab[rows, :, : window.span]

    def _slab(self, slabs: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        if layer not in slabs:
            size = self.rows + self._spare, like.shape[1], self.capacity, like.shape[3]
            slabs[layer] = like.new_zeros(size)
        return slabs[layer]


class TokenCache(KVCache):
    """A cache whose keys and values of one position are neighbours in memory, as a captured step reads and writes them.

    The slab of a layer is (rows, capacity, 2 heads, D): the heads of keys, then those of values.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, prefixes: KVCache | None, spare: int):
        super().__init__(dtype, device, prefixes, spare)
        self._slabs: dict[int, Tensor] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Make room for the rows of a captured step, so the cache moves rarely."""
        super().reserve(padded_rows(rows) if rows else 0, length)

    def flat(self, layer: int) -> Tensor:
        """Return the slab of a layer as (rows * capacity, 2 heads, D)."""
        return self._slabs[layer].flatten(0, 1)

    def allocate(self, layers: int, heads: int, width: int) -> None:
        """Make the slabs of layers that have none yet."""
        for layer in range(layers):
            if layer not in self._slabs:
                like = torch.empty(0, heads, 0, width, dtype=self.dtype, device=self.device)
                self._slab(self._keys, layer, like)

    def drop(self) -> None:
        super().drop()
        self._slabs = {}

    def _resize(self, rows: int, length: int) -> None:
        self._keys, self._values = {}, {}
        for layer in list(self._slabs):
            old = self._slabs.pop(layer)
            self._slab(self._keys, layer, old.new_empty(0, old.shape[2] // 2, 0, old.shape[3]))
            self._slabs[layer][:rows, :length] = old[:rows]

    def _update(self, slabs: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        window, slab = self.window, self._slab(slabs, layer, new)
        rows = slice(window.first, window.first + window.rows)
        if window.fresh:
            slab[rows, :, : window.count] = new
            return new
        places = slab.transpose(1, 2).flatten(0, 1)  # a view: (rows * capacity, heads, D)
        places.index_copy_(0, window.index(1), new.transpose(1, 2).flatten(0, 1))
        return slab[rows, :, : window.span]

    def _slab(self, slabs: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        if layer not in self._slabs:
            heads, width = like.shape[1], like.shape[3]
            slab = like.new_zeros(self.rows + self._spare, self.capacity, 2 * heads, width)
            self._slabs[layer] = slab
            self._keys[layer], self._values[layer] = (half.transpose(1, 2) for half in slab.chunk(2, dim=2))
        return slabs[layer]


class SharedPrefix:
    """How the rows of a window read prompts that are cached once for several rows.

    A row p of the prefix cache serves at most N rows. Their queries are put together, so that its keys are read once. Rows
    without a prefix take part, masked out.
    """

    def __init__(self, slots: Sequence[int | None], lengths: Sequence[int], device: torch.device):
        self.length = max(lengths)
        self.lengths_B = torch.tensor(lengths, device=device)
        self.slots_B = torch.tensor([slot or 0 for slot in slots], device=device)
        self.even = min(lengths) == self.length
        self.prompts = max(slot for slot in slots if slot is not None) + 1
        members: list[list[int]] = [[] for _ in range(self.prompts)]
        for row, slot in enumerate(slots):
            if slot is not None:
                members[slot].append(row)
        self._most = max(map(len, members))
        padded = [row for rows in members for row in rows + [0] * (self._most - len(rows))]
        places = [
            0 if slot is None else slot * self._most + members[slot].index(row)
            for row, slot in enumerate(slots)
        ]
        regular = padded == list(range(len(slots)))
        self._members = None if regular else torch.tensor(padded, device=device)
        self._places = None if regular else torch.tensor(places, device=device)
        absent = [slot is None for slot in slots]
        self._absent = torch.tensor(absent, device=device)[:, None, None, None] if any(absent) else None

    def gather(self, x: Tensor) -> Tensor:
        """Rearrange from rows (B, heads, G, X) to prompts (P, heads, N * G, X)."""
        if self._members is not None:
            x = x.index_select(0, self._members)
        _, heads, queries, width = x.shape
        x = x.view(self.prompts, self._most, heads, queries, width).transpose(1, 2)
        return x.reshape(self.prompts, heads, self._most * queries, width)

    def spread(self, x: Tensor) -> Tensor:
        """Rearrange from prompts (P, heads, N * G, X) to rows (B, heads, G, X); 0 for rows without a prefix."""
        _, heads, queries, width = x.shape
        x = x.view(self.prompts, heads, self._most, queries // self._most, width).transpose(1, 2)
        x = x.reshape(self.prompts * self._most, heads, queries // self._most, width)
        if self._places is not None:
            x = x.index_select(0, self._places)
        return x if self._absent is None else x.masked_fill(self._absent, 0.0)


class Window:
    """The S new positions that one forward pass computes in each of B neighbouring rows of a cache.

    `positions_BS` are token positions, and `last` is the length of the longest row afterwards. `opening` are the rows that
    begin at position 0. A row whose first
    `bases[b]` tokens are in a shared prefix holds only the later ones; `span` is how many of those any row may attend to.
    Where tokens stand for images, `axes_ABS` has the positions of a model that counts along several axes, and `features`
    has numbers and images as `Tower.inputs` takes them.
    `mask` is additive, (B, 1, S, prefix length + span). It is None if nothing needs to be hidden: in a causal pass over
    rows that start empty (`fresh`), or for one token per row with all rows equally long. For one token per row, `parts` are
    neighbouring rows of similar length, and by how many positions the longest of them is shorter than `span`.
    """

    def __init__(
        self,
        cache: KVCache,
        first: int,
        starts: Sequence[int],
        count: int,
        bases: Sequence[int] | None = None,
        prefix: SharedPrefix | None = None,
    ):
        self.first, self.rows, self.count, self.prefix = first, len(starts), count, prefix
        self.capacity, self._device = cache.capacity, cache.device
        offsets = (
            starts if bases is None else [start - base for start, base in zip(starts, bases, strict=True)]
        )
        self.fresh = max(starts) == 0 and count > 1
        self.opening = [row for row, start in enumerate(starts) if not start]
        self.span, self.last = max(offsets) + count, max(starts) + count
        steps = torch.arange(count, device=cache.device)
        self.positions_BS = torch.tensor(starts, device=cache.device)[:, None] + steps
        self._own_BS = (
            self.positions_BS
            if offsets is starts
            else torch.tensor(offsets, device=cache.device)[:, None] + steps
        )
        self.axes_ABS: Tensor | None = None
        self.features: tuple[Tensor, tuple[Image, ...]] | None = None
        self._index: dict[int, Tensor] = {}
        self._mask: Tensor | None = None
        self.parts = similar(offsets) if count == 1 and cache.device.type == "cpu" else [(slice(None), 0)]
        even = min(offsets) == max(offsets) and (prefix is None or prefix.even)
        if not self.fresh and (count > 1 or not even):
            self._mask = self._hidden(cache.dtype, self.capacity if count == 1 else self.span)

    @property
    def mask(self) -> Tensor | None:
        return None if self._mask is None else self._mask[..., : self._lead + self.span]

    def causal_mask(self, dtype: torch.dtype) -> Tensor:
        """Return the explicit mask, (B, 1, S, span), for a forward that requires one."""
        mask = self.mask
        return self._hidden(dtype, self.span) if mask is None else mask

    def index(self, heads: int) -> Tensor:
        """Return the indices of the new vectors in a slab viewed as (rows * heads * capacity, D)."""
        if heads not in self._index:
            rows = torch.arange(self.rows, device=self._device) + self.first
            lanes = rows[:, None] * heads + torch.arange(heads, device=self._device)
            self._index[heads] = (lanes[:, :, None] * self.capacity + self._own_BS[:, None, :]).flatten()
        return self._index[heads]

    def advance(self) -> None:
        """Move every row forward by one position, in place."""
        self.positions_BS += 1
        if self.axes_ABS is not None:
            self.axes_ABS += 1
        if self._own_BS is not self.positions_BS:
            self._own_BS += 1
        self.span, self.last, self.opening = self.span + 1, self.last + 1, []
        for index in self._index.values():
            index += 1
        if self._mask is not None and self.span <= self.capacity:
            self._mask.view(self.rows, -1).scatter_(1, self._own_BS + self._lead, 0.0)

    @property
    def _lead(self) -> int:
        return self.prefix.length if self.prefix else 0

    def _hidden(self, dtype: torch.dtype, width: int) -> Tensor:
        hidden = torch.arange(width, device=self._device) > self._own_BS[:, None, :, None]
        if self.prefix is not None:
            beyond = (
                torch.arange(self._lead, device=self._device) >= self.prefix.lengths_B[:, None, None, None]
            )
            hidden = torch.cat([beyond.expand(-1, -1, self.count, -1), hidden], dim=-1)
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )


def similar(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Split rows where one padded part would waste more than another part costs; see `Window`."""
    parts: list[tuple[slice, int]] = []
    longest, begin, longest_here, waste = max(lengths), 0, lengths[0], 0
    for row, length in enumerate([*lengths[1:], None], start=1):
        if length is not None:
            waste += (row - begin) * max(0, length - longest_here) + max(0, longest_here - length)
            if waste <= PADDING:
                longest_here = max(longest_here, length)
                continue
        parts.append((slice(begin, row), longest - longest_here))
        begin, longest_here, waste = row, length or 0, 0
    return parts
