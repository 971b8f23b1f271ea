"""The rows of the cache: decoding requests in front without gaps, parked sessions behind, shared prompts in a second cache.

Also what rows need to start decoding, and what they need from step to step while the same rows decode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl4llm.core.registry import load
from rl4llm.core.types import SamplingParams
from rl4llm.inference.embedded.kv_cache import KVCache, Window
from rl4llm.inference.embedded.sampling import PERIOD, Sampler
from rl4llm.inference.embedded.stops import Rule, StopTable

if TYPE_CHECKING:
    from rl4llm.data.grammars import Matcher
    from rl4llm.inference.embedded.images import Seen

BITS = "rl4llm.core.allowed:bits"
PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
STARTED_TOKENS = (
    1024  # computed at once on a CPU for requests that start, since meanwhile the engine answers nobody
)


@dataclass(slots=True, eq=False)
class Request:
    """One requested completion; `token_ids` holds the prompt and the tokens sampled so far.

    `versions` are (start, version) of each run of tokens that the same weights sample. `seen` are the images of the prompt,
    in which their tokens are negative numbers. `matcher` is how far the sampled tokens have matched the request's grammar.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str
    max_tokens: int
    rule: Rule
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    cancelled: bool = False
    seen: Seen | None = None
    matcher: Matcher | None = None

    @property
    def sampled(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.logprobs)

    def continue_with(self, version: int) -> None:
        """Note the version of the weights that sample the next tokens."""
        if self.versions and self.versions[-1][0] == len(self.logprobs):  # which have sampled none
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.logprobs), version))


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt without its last token, cached once for a group. Rows read it in place, or copy it if not `in_place`.

    `outdated` ones are of older weights, for the rows that have them already.
    """

    token_ids: tuple[int, ...]
    slot: int
    in_place: bool
    outdated: bool = False


@dataclass(slots=True, eq=False)
class BusyRow:
    """A row of the cache in use by a request, or by a parked session with the tokens `cached_ids`."""

    request: Request  # the last one if the session is parked
    prefix: Prefix | None = None
    session: str = ""
    cached_ids: Sequence[int] = ()
    slot: int = -1
    last_used: int = 0
    over: bool = False  # its request ended, while the batch still computes it
    outdated: bool = False  # a part of its cache was computed by older weights

    @property
    def base(self) -> int:
        """Return how many of the first tokens are in the prefix and not in the row."""
        return len(self.prefix.token_ids) if self.prefix and self.prefix.in_place else 0

    @property
    def cached(self) -> int:
        """Return how many tokens the cache holds: all except the last, which the next step feeds."""
        return len(self.request.token_ids) - 1

    def reusable(self, token_ids: Sequence[int], whole: bool = False) -> int:
        """Return how many leading tokens of a sequence this row's cache holds; 0 if its prefix differs.

        With `whole`, also 0 if the cache holds other tokens after them: a recurrent state cannot be taken back.
        """
        most = min(len(self.cached_ids), len(token_ids))
        if self.cached_ids[:most] != token_ids[:most]:
            most = next(place for place in range(most) if self.cached_ids[place] != token_ids[place])
        return most if most >= self.base and not (whole and most < len(self.cached_ids)) else 0


class Fill(NamedTuple):
    """Tokens to compute into a row of a cache, from position `start` on."""

    slot: int
    start: int
    token_ids: Sequence[int]
    row: BusyRow | None = None
    seen: Seen | None = None

    @staticmethod
    def passes(fills: Iterable[Fill], recurrent: bool, context_length: int) -> Iterator[list[Fill]]:
        """Yield runs of neighbouring rows that fit into one pass when padded to the longest.

        Recurrent states admit no padding, so there only rows with equally many tokens share a pass.
        """
        chunk: list[Fill] = []
        for fill in fills:
            if not fill.token_ids:
                continue
            longer = [*chunk, fill]
            count = max(len(item.token_ids) for item in longer)
            end = count + max(item.start for item in longer)
            apart = chunk and fill.slot != chunk[-1].slot + 1
            apart = apart or (chunk and recurrent and len(fill.token_ids) != len(chunk[-1].token_ids))
            if chunk and (apart or count * len(longer) > PREFILL_TOKENS or end >= context_length):
                yield chunk
                longer = [fill]
            chunk = longer
        if chunk:
            yield chunk


@dataclass(slots=True)
class Newcomer:
    """A row that starts to decode, and how many of its tokens are already cached."""

    row: BusyRow
    start: int

    @property
    def fill(self) -> Fill:
        """Return the tokens that are not cached yet."""
        request = self.row.request
        return Fill(self.row.slot, self.start, request.token_ids[self.start : -1], self.row, request.seen)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Return a sort key: empty rows first, by length; then rows of a group together; then sessions by their slot."""
        row = self.row
        return self.start > 0, row.slot, row.prefix.slot if row.prefix else -1, row.cached


def startable(requests: Sequence[Request], parked: Sequence[BusyRow], device: torch.device) -> int:
    """Return how many of these requests start together: on a CPU as many as have few tokens to compute, but one at least."""
    if device.type != "cpu":
        return len(requests)
    prompts: set[tuple[int, ...]] = set()
    cached, tokens = {row.session: len(row.cached_ids) for row in parked}, 0
    for count, request in enumerate(requests):
        added = len(request.token_ids) - len(request.prompt_ids)
        if request.prompt_ids not in prompts:  # a group's is computed once
            prompts.add(request.prompt_ids)
            added += max(0, len(request.prompt_ids) - cached.get(request.session, 0))
        tokens += added
        if count and added and tokens > STARTED_TOKENS:
            return count
    return len(requests)


@dataclass(slots=True)
class Counters:
    """What was computed so far; `reused_tokens` of prompts came from a cache instead."""

    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    evictions: int = 0


class Decoder(ABC):
    """A decoding path: fills a cache, decodes one token per row, and computes logits at every position.

    `reads_prefixes` is whether it can attend to a `SharedPrefix` in place; else each row holds a copy. `recurrent` is
    whether rows have states, so that neither a window may have padding nor a row be cut. `absent_A` are the ids that are
    never sampled.
    """

    name: str
    reads_prefixes = False
    recurrent = False
    absent_A: Tensor | None = None

    @property
    def form(self) -> str:
        """Return what steps are made of, as the end of a sentence."""
        return ""

    @abstractmethod
    def serves(self, model: Any) -> bool:
        """Return whether this decoder still computes the model: the same modules with the same parameters."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy the weights that are copied, as some are under autocast; call it first, and when weights have changed."""

    def rest(self) -> None:
        """Free the memory that is kept between steps."""

    def cache(self, dtype: torch.dtype, device: torch.device, prefixes: KVCache | None = None) -> KVCache:
        """Return a cache of the only kind that this decoder takes."""
        return KVCache(dtype, device, prefixes)

    def batch(
        self,
        cache: KVCache,
        window: Callable[[], Window],
        requests: Sequence[Request],
        stops: StopTable | None,
    ) -> Batch:
        """Return a batch of the rows of a window, which decode these requests."""
        return Batch(self, cache, window(), requests, stops)

    @abstractmethod
    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None:
        """Fill the cache's window with the keys and values of these tokens."""

    @abstractmethod
    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, V) after one more token per row."""

    @abstractmethod
    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, S, V) after each of these tokens."""


class Batch:
    """Decodes the same rows step by step. New rows need another batch, and so does a full cache.

    `steps_left` says in how many steps the first of the requests reaches its length; set it after `end`. `stuck` is whether
    a grammar exceeded the limits of its library, so that its request cannot continue.
    """

    stuck = False

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        window: Window,
        requests: Sequence[Request],
        stops: StopTable | None,
    ):
        self._decoder, self._cache, self._window, self._stops = decoder, cache, window, stops
        self._sampler = Sampler(
            [item.params for item in requests],
            [len(item.logprobs) for item in requests],
            cache.device,
            decoder.absent_A,
        )
        self._tokens_B = torch.tensor([item.token_ids[-1] for item in requests], device=cache.device)
        self._matchers = {row: item.matcher for row, item in enumerate(requests) if item.matcher}
        self._steps: list[tuple[Tensor, Tensor]] = []
        self.steps_left = min(request.tokens_left for request in requests)

    @property
    def unread(self) -> int:
        """Return the number of steps that were not read."""
        return len(self._steps)

    @property
    def due(self) -> bool:
        """Return whether the steps must be read before the next one; a NaN is detected then."""
        return len(self._steps) == PERIOD

    @property
    def full(self) -> bool:
        """Return whether the cache has no room for another step."""
        return self._window.span > self._cache.capacity

    def step(self) -> None:
        """Append the next token of every row."""
        self._cache.window = self._window
        logits_BV = self._decoder.step(self._tokens_B, self._cache)
        self._tokens_B, logprobs_B = self._sampler(self._constrained(logits_BV))
        if self._matchers:  # their next masks depend on what was sampled
            tokens = self._tokens_B.tolist()
            for row, matcher in self._matchers.items():
                matcher.take(tokens[row])
            self.stuck = any(matcher.error for matcher in self._matchers.values())
        self._steps.append((self._tokens_B, logprobs_B))
        self._window.advance()
        self.steps_left -= 1

    def _constrained(self, logits_BV: Tensor) -> Tensor:
        """Return the logits without the tokens that a grammar excludes."""
        if not self._matchers:
            return logits_BV
        words = np.stack([matcher.mask() for matcher in self._matchers.values()])
        rows = torch.tensor(list(self._matchers), device=logits_BV.device)
        allowed_RV = load(BITS)(torch.from_numpy(words).to(logits_BV.device), slice(0, logits_BV.shape[1]))
        return logits_BV.index_copy(0, rows, logits_BV[rows].masked_fill(~allowed_RV, -torch.inf))

    def codes(self) -> list[int] | None:
        """Return a stop code per row, or None for the common step in which no row may stop."""
        if self._stops is None:
            return None
        codes_B = self._stops(self._tokens_B)
        return codes_B.tolist() if codes_B.any() else None

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, N) and log-probs (B, N) of the steps since the last call."""
        tokens, logprobs = zip(*self._steps, strict=True)
        self._steps = []
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)

    def end(self, slots: Sequence[int]) -> bool:
        """Stop rows and let the others decode; return False where that needs a batch without these rows."""
        return False
