"""The static key-value cache: one slab per layer, rows in front are decoding, and a window says what a pass computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LENGTH_STEP = 64  # capacity grows in multiples of this many tokens


class Window:
    """The S new positions that one forward pass computes in each of B neighbouring rows.

    `positions_BS` are token positions, `span` is how many cached positions any row may look at, and `mask` is additive,
    (B, 1, S, span), or None when nothing has to be hidden: a causal pass over rows that start empty (`fresh`), or one
    token per row with all rows equally long.
    """

    def __init__(self, first: int, starts: Sequence[int], count: int, cache: KVCache):
        self.first, self.rows, self.count = first, len(starts), count
        self.capacity = cache.capacity
        self.fresh = max(starts) == 0 and count > 1
        self.span = max(starts) + count
        starts_B = torch.tensor(starts, device=cache.device)
        self.positions_BS = starts_B[:, None] + torch.arange(count, device=cache.device)
        self._index: dict[int, Tensor] = {}
        self._mask: Tensor | None = None
        if not self.fresh and (count > 1 or min(starts) < max(starts)):
            self._mask = self._hidden(cache.dtype, self.capacity if count == 1 else self.span)

    @property
    def mask(self) -> Tensor | None:
        return None if self._mask is None else self._mask[..., : self.span]

    def causal_mask(self, dtype: torch.dtype) -> Tensor:
        """The mask spelled out, (B, 1, S, span), for a forward that cannot do without one."""
        return self._hidden(dtype, self.span) if self._mask is None else self.mask

    def index(self, heads: int) -> Tensor:
        """Where the new vectors go in a slab seen as (rows * heads * capacity, D)."""
        if heads not in self._index:
            device = self.positions_BS.device
            lane = (torch.arange(self.rows, device=device) + self.first)[:, None] * heads + torch.arange(
                heads, device=device
            )
            self._index[heads] = (lane[:, :, None] * self.capacity + self.positions_BS[:, None, :]).flatten()
        return self._index[heads]

    def advance(self) -> None:
        """Move every row one position on, in place."""
        self.positions_BS += 1
        self.span += 1
        for index in self._index.values():
            index += 1
        if self._mask is not None and self.span <= self.capacity:
            self._mask.view(self.rows, -1).scatter_(1, self.positions_BS, 0.0)

    def _hidden(self, dtype: torch.dtype, width: int) -> Tensor:
        keys = torch.arange(width, device=self.positions_BS.device)
        hidden = keys > self.positions_BS[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, torch.finfo(dtype).min)


class KVCache:
    """Keys and values of all layers: slabs of shape (rows, heads, capacity, D), made and grown when they are needed.

    Unused places hold zeros or old finite values, never garbage: a masked weight of 0 times NaN would be NaN.
    """

    def __init__(self, num_layers: int, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.rows = self.capacity = 0
        self.window: Window | None = None
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in self._slabs())

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens, keeping what is there."""
        if length > self.capacity:
            length = -(-max(length, self.capacity * 3 // 2) // LENGTH_STEP) * LENGTH_STEP
        rows, length = max(rows, self.rows), max(length, self.capacity)
        if (rows, length) == (self.rows, self.capacity):
            return
        for slabs in (self._keys, self._values):
            for layer, slab in enumerate(slabs):
                if slab is not None:
                    slabs[layer] = slab.new_zeros(rows, slab.shape[1], length, slab.shape[3])
                    slabs[layer][: self.rows, :, : self.capacity] = slab
        self.rows, self.capacity = rows, length

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the window's new keys and values, (B, heads, S, D), and return all that its rows may look at."""
        return self._update(self._keys, layer, keys), self._update(self._values, layer, values)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows to other rows; a permutation of rows works too."""
        if not sources:
            return
        source_rows = torch.tensor(sources, device=self.device)
        target_rows = torch.tensor(targets, device=self.device)
        for slab in self._slabs():
            used = slab[:, :, :length]
            used.index_copy_(0, target_rows, used.index_select(0, source_rows))

    def drop(self) -> None:
        """Give the memory back."""
        self.rows = self.capacity = 0
        self.window = None
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    def _update(self, slabs: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        window = self.window
        slab = slabs[layer]
        if slab is None:
            slab = slabs[layer] = new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[3])
        rows = slice(window.first, window.first + window.rows)
        if window.fresh:
            slab[rows, :, : window.count] = new
            return new
        slab.view(-1, slab.shape[3]).index_copy_(0, window.index(slab.shape[1]), new.reshape(-1, slab.shape[3]))
        return slab[rows, :, : window.span]

    def _slabs(self) -> list[Tensor]:
        return [slab for slab in (*self._keys, *self._values) if slab is not None]
