"""The engine core, without a clock or an event loop: admit requests, and decode one step at a time for all rows.

Every sequence is handled in the same way. All its tokens except the last go into the cache (prefill, once per distinct
prefix); the next decode step feeds the last one. So a new prompt, a later turn of a session and a request that restarts
after new weights arrived differ only in how many of their tokens are cached already.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from rl4llm.core.errors import EngineError, RefusedError
from rl4llm.core.images import ImagePlace
from rl4llm.core.registry import load
from rl4llm.core.types import Completion, FinishReason, SamplingParams
from rl4llm.inference.embedded.kv_cache import KVCache, Window
from rl4llm.inference.embedded.row_tables import PrefixTable, RowTable, shared_prefix
from rl4llm.inference.embedded.rows import Batch, BusyRow, Counters, Fill, Newcomer, Request, startable
from rl4llm.inference.embedded.stops import (
    CONTINUES,
    STOP_TOKEN,
    StopRules,
    absent_tokens,
    end_tokens,
    text_of,
)
from rl4llm.inference.paths import Choice, Path, choose_decoder, context_limit

SHARE_FROM = 2048  # cached tokens that reading prompts in place must save to be worth its extra operations
LOOKAHEAD = 128  # tokens by which the cache grows at once
ADMITTED = 16  # waiting requests start when this part of all places is free, unless all of them find one
SEE, SHOW, NEXT = (f"rl4llm.inference.embedded.images:{name}" for name in ("see", "show", "window_of"))
MATCHER = "rl4llm.data.grammars:Matcher"

Finished = tuple[Request, Completion]


class Engine:
    """Serves requests on a model whose weights it shares. Not thread-safe: one event loop drives it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_rows: int,
        context_length: int | None,
        path: Path,
        share_from: int = SHARE_FROM,
        autocast: torch.dtype | None = None,
    ):
        self._model, self._max_rows, self._path, self._share_from = model, max_rows, path, share_from
        self.autocast = autocast
        self.prepared: Choice | None = None  # how to compute with the next weights
        self.context_length, self.context_reason = context_limit(model, context_length)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.device = next(model.parameters()).device
        self._tokenizer = tokenizer
        self._stops = StopRules(tokenizer, self.vocab_size, self.device, end_tokens(model))
        absent = sorted(absent_tokens(tokenizer, self.vocab_size))
        self._absent_A = torch.tensor(absent, device=self.device) if absent else None
        self._counters = Counters()
        self._batch: Batch | None = None
        self._ended: list[BusyRow] = []  # whose requests are over, while the batch still computes them
        self.version = -1
        self.waiting: list[Request] = []
        self._choose_path()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._rows.active)

    @property
    def running(self) -> list[Request]:
        return [row.request for row in self._rows.active if not row.over]

    def describe(self) -> dict[str, Any]:
        """Return the decoding path, the occupancy and the counters."""
        return {
            "path": self._decoder.name,
            "path_reason": f"{self._reason}{self._decoder.form}",
            "context_length": self.context_length,
            "context_reason": self.context_reason,
            "rows_active": len(self._rows.active) - len(self._ended),
            "rows_parked": len(self._rows.parked) + sum(bool(row.session) for row in self._ended),
            "rows_max": self._max_rows,
            "waiting": len(self.waiting),
            "prompts_shared": len(self._prefixes),
            "cache_bytes": self._cache.num_bytes + self._prefix_cache.num_bytes,
            **asdict(self._counters),
        }

    def take_weights(self, version: int, keep_cache: bool = False) -> None:
        """Switch to another version of the parameters: drop all caches, and restart running requests from their tokens.

        With `keep_cache` running requests continue with what older weights cached for them, and nothing else uses it.
        """
        self._flush()
        self.version = version
        serves = self.prepared is None and self._decoder.serves(self._model)
        if keep_cache and serves:
            self._keep_running()
        else:
            self.waiting[:0] = self.running
            self._forget()
        if serves:
            self._decoder.refresh()
        else:
            self._choose_path()

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[ImagePlace] = (),
    ) -> Request:
        """Make a request; raise RefusedError for one that could not run."""
        where = f"generate(session={session!r})"
        self._check_ids(where, prompt_ids)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise RefusedError(
                f"{where}: a prompt of {len(prompt_ids)} tokens leaves no room in the context of {self.context_length} "
                f"({self.context_reason}). Shorten it to {self.context_length - 1} or raise that setting."
            )
        rule, most = self._stops.rule(params), min(params.max_tokens, room)
        matcher = load(MATCHER)(self._tokenizer, params.grammar) if params.grammar else None
        if not images:
            return Request(tuple(prompt_ids), params, session, most, rule, list(prompt_ids), matcher=matcher)
        ids, seen = load(SEE)(self._model, where, prompt_ids, images)
        return Request(tuple(ids), params, session, most, rule, ids, seen=seen, matcher=matcher)

    def release(self, session: str) -> None:
        """Forget a session's cache, now or when its request ends."""
        self._rows.release(session)
        for row in self._ended:
            if row.session == session:
                row.session = ""
        for request in itertools.chain(self.waiting, self.running):
            if request.session == session:
                request.session = ""

    def reset(self) -> None:
        """Forget everything, requests too."""
        self.waiting = []
        self._forget()

    def rest(self) -> None:
        """Free the cache's memory if no request or session uses it; the trainer may need it."""
        if not self.busy and not self._rows.parked:
            self._forget()

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Free the rows of cancelled requests."""
        self.waiting = [request for request in self.waiting if not request.cancelled]
        gone = [row for row in self._rows.active if row.request.cancelled and not row.over]
        if gone:
            self._end_batch()
            self._leave(gone, park=False)

    @torch.inference_mode()
    def abort(self, requests: Collection[Request]) -> list[Finished]:
        """End requests at once, and return the tokens that each has so far."""
        self._end_batch()
        self.waiting = [request for request in self.waiting if request not in requests]
        self._leave([row for row in self._rows.active if row.request in requests], park=False)
        return [(request, self._completion(request, "abort")) for request in requests]

    @torch.inference_mode()
    def sampled(self, request: Request) -> list[int]:
        """Return the tokens of a request so far."""
        self._flush()
        return request.sampled

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit waiting requests, then decode one token in every row; return the finished requests."""
        self.drop_cancelled()
        self._admit()
        if not self._rows.active:
            return []
        batch = self._current_batch()
        batch.step()
        self._counters.decode_steps += 1
        self._counters.decode_tokens += len(self._rows.active) - len(self._ended)
        # Only codes of stops are read in each step: to read tokens is to wait for the GPU, which then has no next step yet.
        codes = batch.codes()
        over = codes or batch.steps_left == 0 or batch.due or batch.stuck
        return self._finish(codes) if over else []

    @torch.inference_mode()
    def score(
        self, token_ids: Sequence[int], images: Sequence[ImagePlace] = (), top: int = 0
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return the log-probs, at temperature 1, of each token after the first, and of the `top` most probable ones there
        with their ids; `images` are places among them."""
        self._check_ids("score", token_ids)
        if len(token_ids) > self.context_length:
            raise RefusedError(
                f"score: {len(token_ids)} tokens do not fit the context of {self.context_length} ({self.context_reason})."
            )
        if len(token_ids) == 1:
            return [], []
        tokens_T = torch.tensor(list(token_ids), device=self.device)
        cache = KVCache(self._cache.dtype, self.device)
        cache.reserve(1, len(token_ids))
        cache.window = Window(cache, 0, [0], len(token_ids) - 1)
        if images:
            ids, seen = load(SEE)(self._model, "score", token_ids, images)
            load(SHOW)(cache.window, [0], [seen], [ids])
        logprobs_TV = self._decoder.logits(tokens_T[None, :-1], cache)[0].float().log_softmax(-1)
        values_TK, ids_TK = (best.tolist() for best in logprobs_TV.topk(top))
        tops = [list(zip(*pair, strict=True)) for pair in zip(values_TK, ids_TK, strict=True)]
        return logprobs_TV.gather(-1, tokens_T[1:, None])[:, 0].tolist(), tops

    def _choose_path(self) -> None:
        choice = self.prepared or choose_decoder(self._model, self._path, self.context_length, self.autocast)
        (self._decoder, self._reason), self.prepared = choice, None
        self._decoder.refresh()  # the weights may be newer than what was prepared
        self._decoder.absent_A = self._absent_A
        dtype = self.autocast or next(self._model.parameters()).dtype
        self._prefix_cache = KVCache(dtype, self.device)
        self._cache = self._decoder.cache(dtype, self.device, self._prefix_cache)
        self._prefixes = PrefixTable(self._prefix_cache)
        self._rows = RowTable(self._cache, self._max_rows)

    def _check_ids(self, where: str, token_ids: Sequence[int]) -> None:
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise RefusedError(
                f"{where}: the prompt is empty, or has a token outside of the vocabulary: 0 to {self.vocab_size - 1}."
            )

    @torch.inference_mode()
    def _keep_running(self) -> None:
        """Continue with new weights on the present cache, which no later request may find."""
        self._end_batch()
        self._rows.parked = []
        self._prefixes.outdate()
        for row in self._rows.active:
            row.outdated = True
            row.request.continue_with(self.version)

    def _forget(self) -> None:
        self._batch, self._ended = None, []
        self._rows.clear()
        self._prefixes.clear()
        self._decoder.rest()

    def _admit(self) -> None:
        """Start waiting requests: as soon as all of them find a place, or a sixteenth of the places at once.

        To compute one prompt takes nearly as long as to compute several, and every row waits for it.
        """
        free = self._rows.free + len(self._ended)
        if not self.waiting or free < min(len(self.waiting), max(1, self._max_rows // ADMITTED)):
            return
        self._end_batch()
        rows = min(self._max_rows, len(self._rows.active) + len(self.waiting))
        self._cache.reserve(rows, 0)  # once for all that wait, since to grow is to copy
        count = startable(self.waiting[: self._rows.free], self._rows.parked, self.device)
        admitted, self.waiting = self.waiting[:count], self.waiting[count:]
        self._prefixes.sweep((*self._rows.active, *self._rows.parked))
        newcomers = [self._newcomer(request) for request in admitted]
        self._share([item for item in newcomers if not item.start])
        newcomers.sort(key=lambda item: item.order)
        self._counters.evictions += self._rows.admit([item.row for item in newcomers])
        self._counters.reused_tokens += sum(item.start for item in newcomers)
        # Rows that cannot read their prefix in place get a copy, if no earlier turn has it.
        apart = [item.row for item in newcomers if item.start and not item.row.base]
        pairs = [(row.prefix, row.slot) for row in apart if row.prefix and not row.cached_ids]
        longest = max((len(prefix.token_ids) for prefix, _ in pairs), default=0)
        self._cache.reserve(0, longest)
        self._cache.copy(self._prefix_cache, [(prefix.slot, slot) for prefix, slot in pairs], longest)
        self._fill(self._cache, [item.fill for item in newcomers if not item.start])
        self._fill(self._cache, [item.fill for item in newcomers if item.start])

    def _newcomer(self, request: Request) -> Newcomer:
        """Return the row of the request's session if its cache helps, or a new row."""
        request.continue_with(self.version)
        row = self._rows.take(request.session)
        start = row.reusable(request.token_ids[:-1], whole=self._decoder.recurrent) if row else 0
        if row is None or not start:
            return Newcomer(BusyRow(request), 0)
        row.request = request
        return Newcomer(row, start)

    def _share(self, newcomers: Sequence[Newcomer]) -> None:
        """Compute a prompt that several requests share only once."""
        groups: dict[tuple[int, ...], list[Newcomer]] = {}
        for item in newcomers:
            groups.setdefault(item.row.request.prompt_ids[:-1], []).append(item)
        new = [
            ids for ids, group in groups.items() if ids and len(group) > 1 and not self._prefixes.find(ids)
        ]
        saved = sum(len(ids) * (len(groups[ids]) - 1) for ids in new)
        in_place = self._decoder.reads_prefixes and saved >= self._share_from
        added = [self._prefixes.add(ids, in_place) for ids in new]
        seen = [groups[prefix.token_ids][0].row.request.seen for prefix in added]
        pairs = zip(added, seen, strict=True)
        self._fill(
            self._prefix_cache, [Fill(new.slot, 0, new.token_ids, None, suffix) for new, suffix in pairs]
        )
        for ids, group in groups.items():
            prefix = self._prefixes.find(ids)
            for item in group if prefix else ():
                item.row.prefix, item.start = prefix, len(ids)

    def _fill(self, cache: KVCache, fills: Sequence[Fill]) -> None:
        for chunk in Fill.passes(fills, self._decoder.recurrent, self.context_length):
            starts, rows = [fill.start for fill in chunk], [fill.row for fill in chunk if fill.row]
            bases = [row.base for row in rows] if any(row.base for row in rows) else None
            count = max(len(fill.token_ids) for fill in chunk)
            padded = [[*fill.token_ids, *[0] * (count - len(fill.token_ids))] for fill in chunk]
            cache.reserve(0, max(starts) + count)
            cache.window = Window(
                cache, chunk[0].slot, starts, count, bases, shared_prefix(rows, self.device)
            )
            seen = [fill.seen for fill in chunk]
            if any(seen):
                padded = load(SHOW)(cache.window, starts, seen, padded)
            self._decoder.prefill(torch.tensor(padded, device=self.device), cache)
            self._counters.prefill_tokens += sum(len(fill.token_ids) for fill in chunk)

    def _current_batch(self) -> Batch:
        """Return the running batch; make a new one if its rows changed or outgrew the cache."""
        if self._batch is not None and self._batch.full:
            self._end_batch()
        if self._batch is not None:
            return self._batch
        rows, requests = self._rows.active, self.running
        starts, bases = [row.cached for row in rows], [row.base for row in rows]
        own_ends = [row.cached - row.base + min(row.request.tokens_left, LOOKAHEAD) for row in rows]
        self._cache.reserve(len(rows), max(own_ends))
        prefix = shared_prefix(rows, self.device)
        window = partial(Window, self._cache, 0, starts, 1, bases if any(bases) else None, prefix)
        seen = [row.request.seen for row in rows]
        if any(seen):
            window = partial(load(NEXT), window, starts, seen)
        stops = self._stops.table([request.rule for request in requests])
        self._batch = self._decoder.batch(self._cache, window, requests, stops)
        return self._batch

    def _end_batch(self) -> None:
        self._flush()
        self._batch = None
        ended, self._ended = self._ended, []
        if ended:
            self._rows.leave(ended)

    def _flush(self) -> None:
        """Read back the tokens sampled since the last call; raise EngineError if any log-prob is not finite."""
        if self._batch is None or not self._batch.unread:
            return
        tokens_BN, logprobs_BN = (x.cpu() for x in self._batch.read())
        live = [row for row in self._rows.active if not row.over]
        if not logprobs_BN[[row.slot for row in live]].isfinite().all():
            raise EngineError(
                "The model gave logits that are not finite (NaN or infinity), so the requests failed. Check its weights."
            )
        new_tokens, new_logprobs = tokens_BN.tolist(), logprobs_BN.tolist()
        for row in live:
            row.request.token_ids.extend(new_tokens[row.slot])
            row.request.logprobs.extend(new_logprobs[row.slot])

    def _finish(self, codes: Sequence[int] | None) -> list[Finished]:
        self._flush()
        finished, leaving = [], []
        for row in self._rows.active:
            if row.over:
                continue
            request, code = row.request, codes[row.slot] if codes else CONTINUES
            stopped = code == STOP_TOKEN
            if code not in (CONTINUES, STOP_TOKEN):
                stopped = self._stops.ends_in_string(request.sampled, request.rule[1])
            if request.matcher and request.matcher.error:
                finished.append((request, self._completion(request, "abort")))
                leaving.append(row)
            elif stopped or not request.tokens_left:
                finished.append((request, self._completion(request, "stop" if stopped else "length")))
                leaving.append(row)
        if leaving:
            self._leave(leaving, park=True)
        return finished

    def _completion(self, request: Request, reason: FinishReason) -> Completion:
        tokens, runs = tuple(request.sampled), tuple(request.versions) or ((0, self.version),)
        text, versions = text_of(self._tokenizer, tokens, request.rule[1]), runs if len(runs) > 1 else ()
        logprobs, grammar = tuple(request.logprobs), request.params.grammar
        return Completion(text, tokens, logprobs, reason, runs[0][1], versions, grammar)

    def _leave(self, leaving: Sequence[BusyRow], park: bool) -> None:
        """Stop decoding rows: they stay in the batch without advancing, or the batch ends."""
        for row in leaving:
            row.session = row.request.session if park and not row.outdated else ""
            row.cached_ids = row.request.token_ids[:-1]
            row.last_used = self._counters.decode_steps
            row.over = True
        self._ended.extend(leaving)
        if self._batch is None or not self._batch.end([row.slot for row in leaving]):
            self._end_batch()
        else:
            self._batch.steps_left = min(request.tokens_left for request in self.running)
