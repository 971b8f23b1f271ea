"""When a completion ends: stop tokens by a table, stop strings by a table of candidates and a check of the text."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl4llm.core.types import SamplingParams

CONTINUES, STOP_TOKEN, MAYBE_STRING = 0, 1, 2
KEPT = 64  # tables of stops, each with a byte for each token of the vocabulary
SLACK = 8  # tokens to decode in front of those that can contain a stop string

Rule = tuple[frozenset[int], tuple[str, ...]]


class StopTable(NamedTuple):
    """The code of every token under every rule, and the offset of each row's rule."""

    codes: Tensor
    offsets_B: Tensor

    def __call__(self, tokens_B: Tensor) -> Tensor:
        return self.codes.index_select(0, self.offsets_B + tokens_B)


def end_tokens(model: Any) -> tuple[int, ...]:
    """Return all tokens that end a completion by a model's generation config; chat models often have two or three."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def absent_tokens(tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the ids that have an embedding but no token: vocabularies are padded to a multiple of a power of two."""
    return frozenset(range(vocab_size)).difference(tokenizer.get_vocab().values())


def stop_tokens(tokenizer: Any, params: SamplingParams, ends: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the tokens that end a completion: those given, the model's `ends` and the tokenizer's, special tokens in stop
    strings."""
    tokenizer_ends = (
        () if params.ignore_eos else filter(lambda end: end is not None, (tokenizer.eos_token_id, *ends))
    )
    special = tokenizer.all_special_tokens if params.stop else ()
    named = [tokenizer.convert_tokens_to_ids(text) for text in params.stop if text in special]
    return tuple(dict.fromkeys((*params.stop_token_ids, *tokenizer_ends, *named)))


def text_of(tokenizer: Any, token_ids: Sequence[int], strings: Sequence[str] = ()) -> str:
    """Return the text of tokens without special tokens, cut before the first stop string."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    places = [place for place in (text.find(stop) for stop in strings) if place >= 0]
    return text[: min(places)] if places else text


class StopRules:
    """What ends a completion, for any mixture of requests, with one table look-up per step.

    A token is a candidate if its text could complete a stop string; only then is the row's text decoded. A stop string
    that is one of the tokenizer's special tokens counts as that token, since special tokens have no text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, device: torch.device, ends: Sequence[int] = ()):
        self._ends = ends
        self._tokenizer, self._vocab_size, self._device = tokenizer, vocab_size, device
        self._token_texts: list[str] | None = None
        self._tables: dict[Rule, Tensor] = {}

    def rule(self, params: SamplingParams) -> Rule:
        """Return what ends this request, apart from its length."""
        special = self._tokenizer.all_special_tokens
        strings = tuple(text for text in params.stop if text and text not in special)
        return frozenset(stop_tokens(self._tokenizer, params, self._ends)), strings

    def table(self, rules: Sequence[Rule]) -> StopTable | None:
        """Return the codes of all tokens for these requests; None if only their length ends them."""
        distinct = list(dict.fromkeys(rules))
        if not any(tokens or strings for tokens, strings in distinct):
            return None
        codes_KV = torch.stack([self._table(rule) for rule in distinct])
        place = {rule: number * self._vocab_size for number, rule in enumerate(distinct)}
        return StopTable(
            codes_KV.flatten(), torch.tensor([place[rule] for rule in rules], device=self._device)
        )

    def ends_in_string(self, token_ids: Sequence[int], strings: tuple[str, ...]) -> bool:
        """Return whether the last of these tokens completes one of the strings."""
        longest = max(len(text.encode()) for text in strings)
        tail = token_ids[-longest - SLACK :]  # all tokens are only decoded if the string is in the last ones
        texts = (text_of(self._tokenizer, tokens) for tokens in (tail, token_ids))
        return all(any(stop in text for stop in strings) for text in texts)

    def _table(self, rule: Rule) -> Tensor:
        if rule not in self._tables:
            while len(self._tables) >= KEPT:
                del self._tables[next(iter(self._tables))]
            tokens, strings = rule
            table = torch.zeros(self._vocab_size, dtype=torch.int8)
            if strings:
                if self._token_texts is None:
                    token_ids = range(min(self._vocab_size, len(self._tokenizer)))
                    self._token_texts = [text_of(self._tokenizer, [token]) for token in token_ids]
                longest = max(map(len, self._token_texts)) + 1
                tails = {stop[-size:] for stop in strings for size in range(1, min(len(stop), longest) + 1)}
                whole = [stop for stop in strings if len(stop) <= longest]
                texts = enumerate(self._token_texts)
                table[[token for token, text in texts if _may_complete(text, tails, whole)]] = MAYBE_STRING
            table[[token for token in tokens if 0 <= token < self._vocab_size]] = STOP_TOKEN
            self._tables[rule] = table.to(self._device)
        return self._tables[rule]


def _may_complete(text: str, tails: Container[str], whole: Sequence[str]) -> bool:
    """Return whether a stop string with one of these tails, or a whole one, may end inside this token's text.

    A part of a character (U+FFFD) may be anything.
    """
    if "\ufffd" in text or any(stop in f" {text}" for stop in whole):
        return True
    return any(form[:end] in tails for form in (text, f" {text}") for end in range(1, len(form) + 1))
