"""Texts without roles, for continued pre-training: each becomes chunks of tokens in which every token is learned.

A text begins with the tokenizer's first token, if it has one, and ends with its last. A chunk begins with the last token of
the chunk before it, which is only read, so each token is learned once and no chat template is involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl4llm.core.errors import DataError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.lengths import place
from rl4llm.data.load import Rows
from rl4llm.data.special import SpecialTokens

_TOKENS, _SPECIAL = "token_ids", "special_tokens"


def hold_text(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rows are texts without roles, which the first one tells."""
    return not rows[0]["messages"] and "text" in rows[0]


def text_chunks(rows: Sequence[Mapping[str, Any]], tokenizer: Any, special_tokens: str, size: int) -> Rows:
    """Return a row for each chunk of at most `size` tokens, in order; `text_group` reads it.

    The tokenizer needs no chat template. `special_tokens` says what such tokens in a text become, see `SpecialTokens`.
    Raises DataError for a conversation among the texts.
    """
    special = SpecialTokens(tokenizer, lambda rows, *, prompt: None, special_tokens)
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    begin, end = ([token] if token is not None else [] for token in ends)
    chunks: list[dict[str, Any]] = []
    places: list[str] = []
    for number, row in enumerate(rows):
        where = place(rows, number)
        if row["messages"]:
            raise DataError(f"{where} is a conversation among texts. Train on each in its own run.")
        try:
            marked = special.marked(row["text"], "user")
        except DataError as error:
            raise type(error)(f"{where}: {error}") from error
        encoded = (
            special.encode(marked)
            if special.stand_in(marked)
            else tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
        )
        token_ids = np.array([*begin, *encoded, *end], np.int32)
        count = special.count([{"role": "user", "content": row["text"]}])
        starts = range(0, max(1, len(token_ids) - 1), max(2, size) - 1)
        for part, start in enumerate(starts):
            name = row["prompt_id"] if len(starts) == 1 else f"{row['prompt_id']}/{part}"
            piece = token_ids[start : start + max(2, size)]
            chunks.append({"prompt_id": name, "messages": [], "ground_truth": None, _TOKENS: piece})
            places.append(where)
        if count:
            chunks[-len(starts)][_SPECIAL] = count
    return Rows(tuple(chunks), getattr(rows, "source", ""), tuple(places), getattr(rows, "skipped", ()))


def text_group(row: Mapping[str, Any], prompt_id: str) -> Group:
    """Return a chunk as a group of one; its first token is context, since nothing predicts it."""
    head, *rest = row[_TOKENS].tolist()
    span = TokenSpan(tuple(rest), "policy", (0.0,) * len(rest), version=0)
    noted = {"metrics": {_SPECIAL: row[_SPECIAL]}} if _SPECIAL in row else {}
    return Group(
        prompt_id, (Trajectory(prompt_id, (TokenSpan.context([head]), span), (), {}, 0.0, "done", noted),)
    )
