"""The engine proper, without a clock or an event loop: admission, and one decode step at a time for all rows.

Every sequence is treated alike. All its tokens but the last go into the cache (prefill, once per distinct prefix); the
last one is what the next decode step feeds. So a fresh prompt, a later turn of a session and a request that starts again
after new weights arrived differ only in how much of them is cached already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, FinishReason, SamplingParams
from rl4llm.inference.kv_cache import KVCache, SharedPrefix, Window
from rl4llm.inference.paths import Path, choose_decoder, context_limit
from rl4llm.inference.rows import PrefixTable, Request, Row, RowTable
from rl4llm.inference.sampling import Sampler
from rl4llm.inference.stops import GOES_ON, STOP_TOKEN, StopRules, StopTable

PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
SHARE_FROM = 2048  # cached tokens that reading prompts in place must save to be worth its extra operations
LOOKAHEAD = 128  # tokens of growth that the cache gets room for at once
FLUSH_STEPS = 64  # a NaN is seen at most this many steps late

Finished = tuple[Request, Completion]


@dataclass(slots=True)
class Counters:
    """What was computed so far; `reused_tokens` of prompts were taken from a cache instead."""

    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    evictions: int = 0


class Fill(NamedTuple):
    """Tokens to be computed into a row of a cache, from position `start` on."""

    slot: int
    start: int
    token_ids: Sequence[int]
    row: Row | None = None


@dataclass(slots=True)
class Newcomer:
    """A row that starts to decode, and how many of its tokens a cache holds already."""

    row: Row
    start: int

    @property
    def fill(self) -> Fill:
        """What is still to be computed."""
        return Fill(self.row.slot, self.start, self.row.request.token_ids[self.start : -1], self.row)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Rows that begin empty first, by length; then groups side by side; then sessions where they are."""
        row = self.row
        return self.start > 0, row.slot, row.prefix.slot if row.prefix else -1, row.cached


@dataclass(slots=True)
class Batch:
    """What decoding needs from step to step while the same rows decode; `steps` holds what was not yet read back."""

    window: Window
    sampler: Sampler
    stops: StopTable | None
    tokens_B: Tensor
    steps_left: int
    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def take(self, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Every row got its next token."""
        self.tokens_B = tokens_B
        self.steps.append((tokens_B, logprobs_B))
        self.window.advance()
        self.steps_left -= 1

    def codes(self) -> list[int] | None:
        """Why rows may have to stop, or None for the common step in which none does."""
        if self.stops is None:
            return None
        codes_B = self.stops(self.tokens_B)
        return codes_B.tolist() if codes_B.any() else None


class Engine:
    """Serves requests on a model whose weights it shares. Not thread-safe: one event loop drives it."""

    def __init__(
        self, model: Any, tokenizer: Any, max_rows: int, context_length: int | None, path: Path, share_from: int = SHARE_FROM
    ):
        if max_rows < 1:
            raise EngineError(f"max_rows={max_rows} is not accepted: at least 1.")
        self._model, self._max_rows, self._path, self._share_from = model, max_rows, path, share_from
        self.context_length, self.context_reason = context_limit(model, context_length)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self._device = next(model.parameters()).device
        self._stops = StopRules(tokenizer, self.vocab_size, self._device)
        self._counters = Counters()
        self._batch: Batch | None = None
        self.version = -1
        self.waiting: list[Request] = []
        self._choose_path()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._rows.active)

    @property
    def running(self) -> list[Request]:
        return [row.request for row in self._rows.active]

    def describe(self) -> dict[str, Any]:
        """Path, occupancy and counters."""
        return {
            "path": self._decoder.name,
            "path_reason": self._reason,
            "context_length": self.context_length,
            "context_reason": self.context_reason,
            "rows_active": len(self._rows.active),
            "rows_parked": len(self._rows.parked),
            "rows_max": self._max_rows,
            "waiting": len(self.waiting),
            "prompts_shared": len(self._prefixes),
            "cache_bytes": self._cache.num_bytes + self._prefix_cache.num_bytes,
            **asdict(self._counters),
        }

    def take_weights(self, version: int) -> None:
        """The parameters hold another version now. All caches go; what was running starts again from its tokens."""
        self._flush()
        self.waiting[:0] = self.running
        self._forget()
        self.version = version
        if not self._decoder.serves(self._model):
            self._choose_path()

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, session: str) -> Request:
        """Check what is asked for; raises EngineError for what could not run."""
        where = f"generate(session={session!r})"
        self._check_ids(where, prompt_ids)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise EngineError(
                f"{where}: a prompt of {len(prompt_ids)} tokens leaves no room in the context of {self.context_length} "
                f"({self.context_reason}). Shorten it to {self.context_length - 1} or raise that setting."
            )
        rule = self._stops.rule(params)
        return Request(tuple(prompt_ids), params, session, min(params.max_tokens, room), rule, list(prompt_ids))

    def release(self, session: str) -> None:
        """Forget a session's cache, now or when its request ends."""
        self._rows.release(session)
        for request in itertools.chain(self.waiting, self.running):
            if request.session == session:
                request.session = ""

    def reset(self) -> None:
        """Forget everything, requests too."""
        self.waiting = []
        self._forget()

    def rest(self) -> None:
        """Give the cache's memory back when nobody has anything in it; the trainer may need it."""
        if not self.busy and not self._rows.parked:
            self._forget()

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Free the rows of cancelled requests."""
        if any(request.cancelled for request in self.waiting):
            self.waiting = [request for request in self.waiting if not request.cancelled]
        gone = [row for row in self._rows.active if row.request.cancelled]
        if gone:
            self._end_batch()
            self._leave(gone, park=False)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit what waits, then decode one token in every row; returns what finished."""
        self.drop_cancelled()
        self._admit()
        if not self._rows.active:
            return []
        batch = self._current_batch()
        self._cache.window = batch.window
        batch.take(*batch.sampler(self._decoder.step(batch.tokens_B, self._cache)))
        self._counters.decode_steps += 1
        self._counters.decode_tokens += len(self._rows.active)
        codes = batch.codes()
        if codes or batch.steps_left == 0 or len(batch.steps) == FLUSH_STEPS:
            return self._finish(codes)
        return []

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of each token after the first."""
        self._check_ids("score", token_ids)
        if len(token_ids) > self.context_length:
            raise EngineError(
                f"score: {len(token_ids)} tokens do not fit the context of {self.context_length} ({self.context_reason})."
            )
        if len(token_ids) == 1:
            return []
        tokens_T = torch.tensor(list(token_ids), device=self._device)
        cache = KVCache(self._cache.dtype, self._device)
        cache.reserve(1, len(token_ids))
        cache.window = Window(cache, 0, [0], len(token_ids) - 1)
        logprobs_TV = self._decoder.logits(tokens_T[None, :-1], cache)[0].float().log_softmax(-1)
        return logprobs_TV.gather(-1, tokens_T[1:, None])[:, 0].tolist()

    def _choose_path(self) -> None:
        self._decoder, self._reason = choose_decoder(self._model, self._path, self.context_length)
        dtype = next(self._model.parameters()).dtype
        self._prefix_cache = KVCache(dtype, self._device)
        self._cache = KVCache(dtype, self._device, prefixes=self._prefix_cache)
        self._prefixes = PrefixTable(self._prefix_cache)
        self._rows = RowTable(self._cache, self._max_rows)

    def _check_ids(self, where: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise EngineError(f"{where}: the prompt is empty; give at least one token.")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise EngineError(f"{where}: token id {wrong} is outside the vocabulary: 0 to {self.vocab_size - 1}.")

    def _forget(self) -> None:
        self._batch = None
        self._rows.clear()
        self._prefixes.clear()

    def _admit(self) -> None:
        taken, self.waiting = self.waiting[: self._rows.free], self.waiting[self._rows.free :]
        if not taken:
            return
        self._end_batch()
        self._prefixes.sweep((*self._rows.active, *self._rows.parked))
        newcomers = [self._newcomer(request) for request in taken]
        self._share([item for item in newcomers if not item.start])
        newcomers.sort(key=lambda item: item.order)
        self._counters.evictions += self._rows.admit([item.row for item in newcomers])
        self._counters.reused_tokens += sum(item.start for item in newcomers)
        self._copy_prefixes([item.row for item in newcomers if item.row.prefix and item.start and not item.row.base])
        self._fill(self._cache, [item.fill for item in newcomers if not item.start])
        self._fill(self._cache, [item.fill for item in newcomers if item.start])

    def _newcomer(self, request: Request) -> Newcomer:
        """The row of the request's session, where it helps, or a new one."""
        request.version = self.version if request.version is None else min(request.version, self.version)
        row = self._rows.take(request.session)
        start = row.reusable(request.token_ids[:-1]) if row else 0
        if row is None or not start:
            return Newcomer(Row(request), 0)
        row.request = request
        return Newcomer(row, start)

    def _share(self, newcomers: Sequence[Newcomer]) -> None:
        """Compute each prompt that several requests begin with once."""
        groups: dict[tuple[int, ...], list[Newcomer]] = {}
        for item in newcomers:
            groups.setdefault(item.row.request.prompt_ids[:-1], []).append(item)
        new = [ids for ids, group in groups.items() if ids and len(group) > 1 and not self._prefixes.find(ids)]
        saved = sum(len(ids) * (len(groups[ids]) - 1) for ids in new)
        in_place = self._decoder.reads_prefixes and saved >= self._share_from
        added = [self._prefixes.add(ids, in_place) for ids in new]
        self._fill(self._prefix_cache, [Fill(prefix.slot, 0, prefix.token_ids) for prefix in added])
        for ids, group in groups.items():
            prefix = self._prefixes.find(ids)
            for item in group if prefix else ():
                item.row.prefix, item.start = prefix, len(ids)

    def _copy_prefixes(self, rows: Sequence[Row]) -> None:
        """Give rows that cannot read their prefix in place a copy of it; those back from an earlier turn have theirs."""
        pairs = [(row.prefix, row.slot) for row in rows if row.prefix and not row.cached_ids]
        longest = max((len(prefix.token_ids) for prefix, _ in pairs), default=0)
        self._cache.reserve(0, longest)
        self._cache.copy(self._prefix_cache, [(prefix.slot, slot) for prefix, slot in pairs], longest)

    def _fill(self, cache: KVCache, fills: Sequence[Fill]) -> None:
        for chunk in self._chunks([fill for fill in fills if fill.token_ids]):
            starts, rows = [fill.start for fill in chunk], [fill.row for fill in chunk if fill.row]
            bases = [row.base for row in rows] if any(row.base for row in rows) else None
            count = max(len(fill.token_ids) for fill in chunk)
            padded = [[*fill.token_ids, *[0] * (count - len(fill.token_ids))] for fill in chunk]
            cache.reserve(0, max(starts) + count)
            cache.window = Window(cache, chunk[0].slot, starts, count, bases, self._prefix_of(rows))
            self._decoder.prefill(torch.tensor(padded, device=self._device), cache)
            self._counters.prefill_tokens += sum(len(fill.token_ids) for fill in chunk)

    def _chunks(self, fills: Sequence[Fill]) -> Iterator[list[Fill]]:
        """Runs of neighbouring rows that fit one pass, each padded to its longest."""
        chunk: list[Fill] = []
        for fill in fills:
            longer = [*chunk, fill]
            count = max(len(item.token_ids) for item in longer)
            end = count + max(item.start for item in longer)
            apart = chunk and fill.slot != chunk[-1].slot + 1
            if chunk and (apart or count * len(longer) > PREFILL_TOKENS or end >= self.context_length):
                yield chunk
                longer = [fill]
            chunk = longer
        if chunk:
            yield chunk

    def _prefix_of(self, rows: Sequence[Row]) -> SharedPrefix | None:
        bases = [row.base for row in rows]
        if not any(bases):
            return None
        return SharedPrefix([row.prefix.slot if row.prefix and row.base else None for row in rows], bases, self._device)

    def _current_batch(self) -> Batch:
        """The running batch, made anew when its rows changed or outgrew the cache."""
        if self._batch is not None and self._batch.window.span > self._cache.capacity:
            self._end_batch()
        if self._batch is None:
            self._batch = self._new_batch()
        return self._batch

    def _new_batch(self) -> Batch:
        rows, requests = self._rows.active, self.running
        starts, bases = [row.cached for row in rows], [row.base for row in rows]
        own_ends = [row.cached - row.base + min(row.request.tokens_left, LOOKAHEAD) for row in rows]
        self._cache.reserve(len(rows), max(own_ends))
        return Batch(
            Window(self._cache, 0, starts, 1, bases if any(bases) else None, self._prefix_of(rows)),
            Sampler([item.params for item in requests], [len(item.logprobs) for item in requests], self._device),
            self._stops.table([request.rule for request in requests]),
            torch.tensor([request.token_ids[-1] for request in requests], device=self._device),
            min(request.tokens_left for request in requests),
        )

    def _end_batch(self) -> None:
        self._flush()
        self._batch = None

    def _flush(self) -> None:
        """Read back what was sampled since the last time."""
        if self._batch is None or not self._batch.steps:
            return
        tokens, logprobs = zip(*self._batch.steps, strict=True)
        self._batch.steps = []
        logprobs_BN = torch.stack(logprobs, dim=1)
        if not logprobs_BN.isfinite().all():
            raise EngineError(
                "The model gave logits that are not finite (NaN or infinity); do its weights hold NaN? Nothing was returned."
            )
        for request, new_tokens, new_logprobs in zip(
            self.running, torch.stack(tokens, dim=1).tolist(), logprobs_BN.tolist(), strict=True
        ):
            request.token_ids.extend(new_tokens)
            request.logprobs.extend(new_logprobs)

    def _finish(self, codes: Sequence[int] | None) -> list[Finished]:
        """Take out the rows whose completion is over."""
        self._flush()
        finished, leaving = [], []
        for row, code in zip(self._rows.active, codes or itertools.repeat(GOES_ON), strict=bool(codes)):
            reason = self._finish_reason(row.request, code)
            if reason:
                finished.append((row.request, self._completion(row.request, reason)))
                leaving.append(row)
        if leaving:
            self._batch = None
            self._leave(leaving, park=True)
        return finished

    def _finish_reason(self, request: Request, code: int) -> FinishReason | None:
        stopped = code == STOP_TOKEN
        if code not in (GOES_ON, STOP_TOKEN):
            stopped = self._stops.ends_in_string(request.sampled, request.rule[1])
        if stopped:
            return "stop"
        return None if request.tokens_left else "length"

    def _completion(self, request: Request, reason: FinishReason) -> Completion:
        assert request.version is not None  # since it was admitted
        sampled = request.sampled
        text = self._stops.text(sampled, request.rule[1])
        return Completion(text, tuple(sampled), tuple(request.logprobs), reason, request.version)

    def _leave(self, leaving: Sequence[Row], park: bool) -> None:
        for row in leaving:
            row.session = row.request.session if park else ""
            row.cached_ids = row.request.token_ids[:-1]
            row.last_used = self._counters.decode_steps
        self._rows.leave(leaving)
