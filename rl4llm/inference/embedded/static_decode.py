"""Decoding steps in a fixed shape, captured as CUDA graphs where there is a GPU.

On a GPU the launches of a step's kernels take longer than those of a small model compute. A graph repeats them on the same
memory. So everything that a step reads and writes stays in place: tokens, positions, uniform numbers, stop codes, and what
was sampled since the last read. Rows are padded to a power of two. A row that ends stays in the batch without advancing,
until half of the rows have ended or a request waits for a place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.inference.embedded.flash import PLAIN, compiled, flash_for
from rl4llm.inference.embedded.kv_cache import LEAST_ROWS, KVCache, TokenCache, Window, padded_rows
from rl4llm.inference.embedded.llama_decode import LlamaDecoder
from rl4llm.inference.embedded.rows import Batch, Request
from rl4llm.inference.embedded.sampling import PERIOD, Kind, StaticSampler
from rl4llm.inference.embedded.stops import StopTable
from rl4llm.runtime.devices import has_graphs

FAILURES = (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
Key = tuple[Any, ...]
"""What tells captured steps apart: rows, what the sampler does, the number of rules that stop."""


class StaticStep:
    """What one step reads and writes, and the step itself. Rows behind the given ones are padding.

    A row that is not live computes its last token again, in its place. Padding does so at position 0 of the cache's spare
    row. Without a `kind` the step ends with the logits.
    """

    def __init__(self, decoder: StaticDecoder, cache: TokenCache, rows: int, kind: Kind | None, rules: int):
        device = cache.device
        self._decoder, self.cache, self.rows = decoder, cache, rows
        self.tokens_B, self._offsets_B = torch.zeros(2, rows, dtype=torch.long, device=device)
        # The position of each row's token, and the place of its keys and values in a slab viewed as (rows * capacity, ...).
        self._moving_2B = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.positions_B, self.places_B = self._moving_2B
        self.lengths_B = torch.ones(rows, dtype=torch.int32, device=device)
        self._rules = rules
        self._lanes_B = torch.arange(rows, device=device)
        queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.begins = queries, queries * cache.capacity
        self._sampler = None if kind is None else StaticSampler(kind, rows, device, decoder.absent_A)
        self._codes = (
            torch.zeros(rules * decoder.vocab_size, dtype=torch.int8, device=device) if rules else None
        )
        self._is_live_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self._codes_B = torch.zeros(rows, dtype=torch.int8, device=device)
        self._tokens_NB = torch.zeros(PERIOD, rows, dtype=torch.long, device=device)
        self._logprobs_NB = torch.zeros(PERIOD, rows, device=device)
        self.logits_BV: Tensor | None = None
        self.layout = decoder.layout(cache)
        nothing = self.tokens_B[:0]
        self.place(nothing, nothing)  # the first run, which only warms up, must not write into rows
        self.run = decoder.captured(self._compute)

    def place(self, tokens_B: Tensor, positions_B: Tensor) -> None:
        """Write what the next step computes."""
        count = len(tokens_B)
        self.tokens_B[:count], self.positions_B[:count] = tokens_B, positions_B
        self.positions_B[count:] = 0
        slots_B = torch.where(self._lanes_B < count, self._lanes_B, self.cache.rows)
        self.places_B.copy_(slots_B * self.cache.capacity + self.positions_B)
        self.lengths_B.copy_(self.positions_B + 1)

    def begin(self, requests: Sequence[Request], stops: StopTable | None) -> None:
        """Write the requests whose tokens the following steps sample."""
        assert self._sampler is not None
        self._sampler.set([item.params for item in requests], [len(item.logprobs) for item in requests])
        self.keep(range(len(requests)))
        if stops is not None and self._codes is not None:
            self._codes.copy_(stops.codes)
            self._offsets_B[: len(requests)] = stops.offsets_B

    def keep(self, slots: Sequence[int]) -> None:
        """Let only these rows decode."""
        live = torch.zeros(self.rows, dtype=torch.bool)
        live[list(slots)] = True
        self._is_live_B.copy_(live)

    def refill(self) -> None:
        """Start another period: all that was sampled has been read."""
        assert self._sampler is not None
        self._sampler.refill()

    def codes(self) -> list[int] | None:
        """Return a stop code per row, or None if no live row may stop."""
        if self._codes is None:
            return None
        codes: list[int] = self._codes_B.tolist()  # the one wait of a step
        return codes if any(codes) else None

    def sampled(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probs (B, N) of some steps of this period."""
        return self._tokens_NB[begin:end].t(), self._logprobs_NB[begin:end].t()

    def _compute(self) -> None:
        logits_BV = self._decoder.compute(self)
        if self._sampler is None:
            self.logits_BV = logits_BV
            return
        place_1 = self._sampler.place_1
        tokens_B, logprobs_B = self._sampler(logits_BV)
        self._tokens_NB.index_copy_(0, place_1, tokens_B[None])
        self._logprobs_NB.index_copy_(0, place_1, logprobs_B[None])
        if self._codes is not None:
            places_B = tokens_B + self._offsets_B if self._rules > 1 else tokens_B
            codes_B = self._codes.index_select(0, places_B)
            torch.mul(codes_B, self._is_live_B, out=self._codes_B)
        torch.where(self._is_live_B, tokens_B, self.tokens_B, out=self.tokens_B)
        self._moving_2B.add_(self._is_live_B)
        self.lengths_B.add_(self._is_live_B)
        place_1.add_(1)


class StaticBatch(Batch):
    """The rows of a `StaticStep` that decode together."""

    def __init__(
        self, step: StaticStep, positions: Sequence[int], requests: Sequence[Request], stops: StopTable | None
    ):
        device = step.cache.device
        self._step, self._count = step, len(requests)
        step.place(
            torch.tensor([item.token_ids[-1] for item in requests], device=device),
            torch.tensor(positions, device=device),
        )
        step.begin(requests, stops)
        self._live = set(range(len(requests)))
        self._longest = max(positions)
        self._done = self._read = 0
        self.steps_left = min(request.tokens_left for request in requests)

    @property
    def unread(self) -> int:
        return self._done - self._read

    @property
    def due(self) -> bool:
        return self._done == PERIOD

    @property
    def full(self) -> bool:
        return self._longest >= self._step.cache.capacity

    def step(self) -> None:
        if self._done == PERIOD:
            self._step.refill()
            self._done = self._read = 0
        self._step.run()
        self._done += 1
        self._longest += 1
        self.steps_left -= 1

    def codes(self) -> list[int] | None:
        codes = self._step.codes()
        return codes and codes[: self._count]

    def read(self) -> tuple[Tensor, Tensor]:
        tokens_BN, logprobs_BN = self._step.sampled(self._read, self._done)
        self._read = self._done
        return tokens_BN[: self._count], logprobs_BN[: self._count]

    def end(self, slots: Sequence[int]) -> bool:
        self._live -= set(slots)
        if not self._live or (2 * len(self._live) <= self._step.rows and self._step.rows > LEAST_ROWS):
            return False
        self._step.keep(sorted(self._live))
        return True


class StaticDecoder(LlamaDecoder):
    """The fast path with steps in a fixed shape, captured where there is a GPU.

    Captured steps read the copies of weights that they found, so the engine calls `rest` before `refresh`.
    """

    name = "graph"
    reads_prefixes = False

    def __init__(self, model: Any, context_length: int, autocast: torch.dtype | None = None):
        super().__init__(model, context_length, autocast)
        device = self.embedding.device
        self._captures = has_graphs(device)
        self._pool: Any = None
        self._steps: dict[Key, StaticStep] = {}
        sizes = (device, self.dtype, self.heads, self.kv_heads, self.head_dim)
        self._flash, self.attention = flash_for(*sizes)
        self._fused = compiled() if self._captures else PLAIN

    @property
    def form(self) -> str:
        steps = "CUDA graphs" if self._captures else "steps in a fixed shape"
        kernels = "compiled" if self._fused.compiled else "plain"
        return f"; {steps}, {kernels} kernels, {self.attention}"

    def rest(self) -> None:
        """Forget the captured steps, and the memory that they share."""
        self._steps.clear()
        self._pool = None

    def cache(self, dtype: torch.dtype, device: torch.device, prefixes: KVCache | None = None) -> TokenCache:
        """Return a cache for `step` and `batch`, with a spare row for padding."""
        return TokenCache(dtype, device, prefixes, spare=1)

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, V) after one more token per row; the next step overwrites them."""
        step = self._step(cache, len(token_ids_B), None, 0)
        step.place(token_ids_B, cache.window.positions_BS[:, 0])
        step.run()
        assert step.logits_BV is not None
        return step.logits_BV[: len(token_ids_B)]

    def batch(
        self,
        cache: KVCache,
        window: Callable[[], Window],
        requests: Sequence[Request],
        stops: StopTable | None,
    ) -> Batch:
        """Return a batch of rows. With top-k, top-p or grammars, only its logits come from a captured step."""
        kind = Kind.of([request.params for request in requests])
        if kind.filters or any(request.matcher for request in requests):
            return super().batch(cache, window, requests, stops)
        rules = 0 if stops is None else len(stops.codes) // self.vocab_size
        step = self._step(cache, len(requests), kind, rules)
        return StaticBatch(step, [len(item.token_ids) - 1 for item in requests], requests, stops)

    def layout(self, cache: KVCache) -> Key:
        """Return what a captured step finds at fixed addresses: the cache's slabs and the tables of rotations."""
        return id(cache), cache.placed, len(self.rotations(cache.capacity)[0])

    def compute(self, step: StaticStep) -> Tensor:
        """Return the logits (B, V) after one more token in each row of a step."""
        cache, fused = step.cache, self._fused
        cos, sin = (
            table.index_select(0, step.positions_B)[:, None] for table in self.rotations(cache.capacity)
        )
        attend = self._attention(step)
        x = F.embedding(step.tokens_B, self.embedding)
        normed = self.layers[0].attention_norm(x)
        norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for number, (layer, after) in enumerate(zip(self.layers, norms, strict=True)):
            heads_BHD = fused.rotate(*layer.heads(normed), cos, sin, layer.query_norm, layer.key_norm)
            new = heads_BHD[:, self.heads :]
            cache.flat(number).index_copy_(0, step.places_B, new.to(cache.dtype))
            mixed = attend(number, heads_BHD[:, : self.heads])
            x, normed = fused.add_norm(x, layer.output(mixed)[0], *layer.mlp_norm)
            x, normed = fused.add_norm(x, layer.down(fused.gated(*layer.gates(normed)))[0], *after)
        return self.head(normed)[0]

    def captured(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a replay of a step that this runs once, or the step itself where it cannot be captured."""
        if not self._captures:
            return compute
        try:
            self._warm_up(compute)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Calls of other threads, such as a tracker's, must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captures = False
            warnings.warn(f"Decoding runs without CUDA graphs: {str(error)[:200]}", stacklevel=2)
            return compute
        replay: Callable[[], None] = graph.replay
        return replay

    def _warm_up(self, compute: Callable[[], None]) -> None:
        """Run a step in another stream, as a capture needs it before; with plain functions if compiled ones fail."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            try:
                compute()
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                if not self._fused.compiled:
                    raise
                self._fused = PLAIN
                warnings.warn(f"Decoding runs without compiled kernels: {str(error)[:200]}", stacklevel=2)
                compute()
        torch.cuda.current_stream().wait_stream(side)

    def _step(self, cache: KVCache, given: int, kind: Kind | None, rules: int) -> StaticStep:
        assert isinstance(cache, TokenCache)
        rows = padded_rows(given)
        cache.allocate(self.num_layers, self.kv_heads, self.head_dim)
        key = (rows, kind, rules)
        if key not in self._steps or self._steps[key].layout != self.layout(cache):
            self._steps[key] = StaticStep(self, cache, rows, kind, rules)
        return self._steps[key]

    def _attention(self, step: StaticStep) -> Callable[[int, Tensor], Tensor]:
        """Return the attention of the queries (B, heads, D) of a layer, by its number, as (B, heads * D)."""
        cache = step.cache
        if self._flash is not None:
            flash = self._flash
            return lambda number, query: flash(
                query, cache.flat(number), step.begins, cache.capacity, step.lengths_B, self.scaling
            ).flatten(1)
        hidden_BS = torch.arange(cache.capacity, device=cache.device) > step.positions_B[:, None]
        mask = torch.zeros(hidden_BS.shape, dtype=cache.dtype, device=cache.device)
        mask = mask.masked_fill_(hidden_BS, torch.finfo(cache.dtype).min)[:, None, None]

        def attend(number: int, query: Tensor) -> Tensor:
            keys, values = cache.read(number, step.rows, cache.capacity)
            return self.attend_one(query, keys, values, mask)[:, 0]

        return attend
