"""Grammars that completions have to match, as llguidance reads them; the only file that imports it.

A grammar is a text in llguidance's form of Lark, with the tokens at which the policy's turn ends. It alone travels and is
stored: the sets of allowed tokens follow from it and from the sampled tokens, so engine and trainer compute the same ones.
Matching does not depend on time, and llguidance limits the work for each token and for a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor

from rl4llm.core.errors import DataError, RefusedError
from rl4llm.core.types import TokenSpan, Trajectory

MOST_CHARS = 100_000  # of a grammar, since an agent may send it


class Matcher:
    """How far a completion has matched a grammar. Raises RefusedError for an invalid or too large grammar.

    `error` tells why no more tokens can be matched; then `mask` and `take` have no meaning.
    """

    def __init__(self, tokenizer: Any, grammar: str):
        self._matcher = _compiled(tokenizer, grammar).deep_copy()

    @property
    def error(self) -> str:
        return str(self._matcher.get_error())

    def mask(self) -> NDArray[np.int32]:
        """Return the tokens that may come next, as bits of int32 words."""
        content = self._matcher.compute_bitmask()
        return np.frombuffer(content + bytes(-len(content) % 4), np.int32)

    def take(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)


def masks(tokenizer: Any, grammar: str, token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Return for each sampled token the tokens that were allowed in its place; raise DataError if it was not."""
    matcher, rows = Matcher(tokenizer, grammar), []
    for token in token_ids:
        rows.append(matcher.mask())
        matcher.take(token)
        if matcher.error:
            raise DataError(
                f"The engine sampled the token {token}, which the trainer's grammar excludes: {matcher.error:.300} "
                "Start the server with the same tokenizer and with llguidance."
            )
    return np.stack(rows)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """For each flat token of some records the row of its mask among C, or -1 if no grammar constrained it."""

    ids: NDArray[np.int64]
    masks_CW: NDArray[np.int32]

    @classmethod
    def of(cls, records: Sequence[Trajectory], tokenizer: Any) -> AllowedTokens:
        """Replay the turns that grammars constrained. Equal masks get one row."""
        if tokenizer is None:
            raise DataError("Batching needs the tokenizer for turns that a grammar constrained.")
        numbers: dict[bytes, int] = {}
        ids = [number for record in records for number in _numbers(record.spans, tokenizer, numbers)]
        table = np.frombuffer(b"".join(numbers), np.int32).reshape(len(numbers), -1)
        return cls(np.array(ids, np.int64), table)

    def within(self, source: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor] | None:
        """Return both for some of the tokens; None if no grammar constrained them."""
        chosen, ids = np.unique(self.ids[source], return_inverse=True)
        free = int(chosen[0] < 0)
        if len(chosen) == free:
            return None
        return ids - free, torch.from_numpy(self.masks_CW[chosen[free:]])


def _numbers(spans: Sequence[TokenSpan], tokenizer: Any, numbers: dict[bytes, int]) -> list[int]:
    """Return the number of each token's mask, and add new masks; several versions of the weights may have written a turn."""
    ids: list[int] = []
    for grammar, run in groupby(spans, key=lambda span: span.grammar):
        tokens = [token for span in run for token in span.token_ids]
        if grammar and tokens:
            rows = (row.tobytes() for row in masks(tokenizer, grammar, tokens))
            ids += [numbers.setdefault(row, len(numbers)) for row in rows]
        else:
            ids += [-1] * len(tokens)
    return ids


@lru_cache(256)
def _compiled(tokenizer: Any, grammar: str) -> Any:
    if len(grammar) > MOST_CHARS:
        raise RefusedError(f"A grammar of {len(grammar)} characters is not accepted: {MOST_CHARS} at most.")
    matcher = LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
    if error := matcher.get_error():
        raise RefusedError(f"The grammar is not accepted: {error:.300}")
    return matcher


@lru_cache(4)
def _vocabulary(tokenizer: Any) -> Any:
    """Return a tokenizer as llguidance reads it, which takes a second for a large vocabulary."""
    return from_tokenizer(tokenizer)
