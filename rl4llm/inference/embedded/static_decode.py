"""The decode step of the fast path in a fixed shape, so that a GPU can replay it as a CUDA graph.

Without a graph Python launches hundreds of kernels for a token, which takes longer than those of a small model compute. A
graph repeats them on the same memory. So rows are padded to a power of two, each attends to the whole capacity of the
cache, and what depends on positions is computed from a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl4llm.inference.embedded.kv_cache import KVCache, Window
from rl4llm.inference.embedded.llama_decode import LlamaDecoder

Layout = tuple[Any, ...]
"""What a captured step reads at fixed addresses: the cache's slabs and the tables of rotations."""


class StaticWindow(Window):
    """One new position in each of the first rows of a cache; what changes from step to step are tensors.

    Rows behind the given ones are padding. They compute a token at position 0 of the cache's spare row.
    """

    def __init__(self, cache: KVCache, rows: int):
        self.first, self.rows, self.count, self.prefix, self.fresh, self.opening = 0, rows, 1, None, False, []
        self.span = self.last = self.capacity = cache.capacity
        self._spare, self._dtype, self._device = cache.rows, cache.dtype, cache.device
        self._rows_B = torch.arange(rows, device=cache.device)
        self.tokens_B, self._slots_B = torch.zeros(2, rows, dtype=torch.long, device=cache.device)
        self.positions_BS = self._own_BS = torch.zeros(rows, 1, dtype=torch.long, device=cache.device)

    def set(self, tokens_B: Tensor, positions_BS: Tensor) -> None:
        """Write what the next step computes."""
        given = len(tokens_B)
        self.tokens_B[:given], self.positions_BS[:given] = tokens_B, positions_BS
        self.positions_BS[given:] = 0
        self._slots_B.copy_(torch.where(self._rows_B < given, self._rows_B, self._spare))

    def begin(self) -> None:
        """Compute the mask from the positions, as a part of the step."""
        self._index, self._mask = {}, self._hidden(self._dtype, self.span)

    def index(self, heads: int) -> Tensor:
        """Return the indices of the new vectors in a slab viewed as (rows * heads * capacity, D)."""
        if heads not in self._index:
            lanes = self._slots_B[:, None] * heads + torch.arange(heads, device=self._device)
            self._index[heads] = (lanes * self.capacity + self.positions_BS).flatten()
        return self._index[heads]


class StaticDecoder:
    """The fast path with steps in a fixed shape, captured where there is a GPU."""

    name = "graph"
    reads_prefixes = False
    recurrent = False
    spare_rows = 1

    def __init__(self, fast: LlamaDecoder, device: torch.device):
        self._fast = fast
        self._captures = device.type == "cuda" and torch.cuda.is_available()
        self._pool: Any = None
        self._steps: dict[int, tuple[Layout, StaticWindow, Callable[[], Tensor]]] = {}

    def serves(self, model: Any) -> bool:
        """Return whether this decoder still computes the model."""
        return self._fast.serves(model)

    def refresh(self) -> None:
        """Copy the weights that are copied."""
        self._fast.refresh()
        self.rest()

    def rest(self) -> None:
        """Forget the captured steps, and the memory that they share: a graph cannot use a pool that no other one holds."""
        self._steps.clear()
        self._pool = None

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        """Fill the cache's window with the keys and values of these tokens."""
        self._fast.prefill(token_ids_BS, cache)

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, S, V) after each of these tokens."""
        return self._fast.logits(token_ids_BS, cache)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, V) after one more token per row; the next step overwrites them."""
        given, own = len(token_ids_B), cache.window
        rows = 1 << (given - 1).bit_length()
        cache.reserve(rows, 0)
        layout, window, run = self._steps.get(rows, ((), None, None))
        if window is None or run is None or layout != self._layout(cache):
            window = StaticWindow(cache, rows)
            run = self._plain(window, cache)
            window.set(token_ids_B, own.positions_BS)
            if self._captures:
                run = self._captured(run)
            else:
                run()  # makes slabs and tables
            self._steps[rows] = self._layout(cache), window, run
        window.set(token_ids_B, own.positions_BS)
        logits_BV = run()[:given]
        cache.window = own
        return logits_BV

    def _layout(self, cache: KVCache) -> Layout:
        return id(cache), cache.placed, cache.rows, cache.capacity, id(self._fast.tables)

    def _plain(self, window: StaticWindow, cache: KVCache) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache.window = window
            window.begin()
            return self._fast.step(window.tokens_B, cache)

        return run

    def _captured(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a replay of the step; the step itself, from now on, where it cannot be captured."""
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits_BV = run()
        except RuntimeError as error:
            self._captures = False
            warnings.warn(f"Decoding runs without CUDA graphs: {str(error)[:200]}", stacklevel=2)
            return run

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay
