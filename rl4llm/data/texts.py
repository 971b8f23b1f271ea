"""Texts without roles, for continued pre-training: each becomes chunks of tokens in which every token is learned.

A text begins with the tokenizer's first token, if it has one, and ends with its last. A chunk begins with the last token of
the chunk before it, which is only read, so each token is learned once and no chat template is involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl4llm.core.errors import DataError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.lengths import place
from rl4llm.data.load import Rows
from rl4llm.data.special import SpecialTokens

_TOKENS, _SPECIAL = "token_ids", "special_tokens"


def hold_text(rows: Any) -> bool:
    """Return whether rows are texts without roles; raise DataError if only some of them are."""
    kinds = [not row["messages"] and "text" in row for row in rows]
    if any(kinds) and not all(kinds):
        odd = kinds.index(not kinds[0])
        raise DataError(
            f"{place(rows, odd)} is {'a text' if kinds[odd] else 'a conversation'}, unlike the rows before it. Next step: "
            "train on texts (column 'text') and on conversations in separate runs."
        )
    return any(kinds)


class Texts:
    """Cuts texts into chunks of at most `size` tokens.

    Args:
        tokenizer: of the policy; it needs no chat template.
        special_tokens: what special tokens in a text become, see `SpecialTokens`.
        size: tokens of a chunk, at least 2.
    """

    def __init__(self, tokenizer: Any, special_tokens: str, size: int):
        self._tokenizer, self._size = tokenizer, max(2, size)
        self._special = SpecialTokens(tokenizer, lambda rows, *, prompt: None, special_tokens)

    def chunks(self, rows: Any) -> Rows:
        """Return a row for each chunk, in order; `text_group` reads it."""
        found: list[dict[str, Any]] = []
        places: list[str] = []
        for number in range(len(rows)):
            row, where = rows[number], place(rows, number)
            try:
                token_ids = np.array(self._token_ids(row["text"]), np.int32)
            except DataError as error:
                raise type(error)(f"{where}: {error}") from error
            count = self._special.count([{"role": "user", "content": row["text"]}])
            starts = range(0, max(1, len(token_ids) - 1), self._size - 1)
            for part, start in enumerate(starts):
                name = row["prompt_id"] if len(starts) == 1 else f"{row['prompt_id']}/{part}"
                piece = token_ids[start : start + self._size]
                made: dict[str, Any] = {
                    "prompt_id": name,
                    "messages": [],
                    "ground_truth": None,
                    _TOKENS: piece,
                }
                found.append(made | ({_SPECIAL: count} if count and part == 0 else {}))
                places.append(where)
        return Rows(tuple(found), getattr(rows, "source", ""), tuple(places))

    def _token_ids(self, text: str) -> list[int]:
        marked = self._special.marked(text, "user")
        if self._special.stand_in(marked):
            token_ids = self._special.encode(marked)
        else:
            token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ends = ([token] if token is not None else [] for token in self._ends)
        return [*next(ends), *token_ids, *next(ends)]

    @property
    def _ends(self) -> tuple[int | None, int | None]:
        return self._tokenizer.bos_token_id, self._tokenizer.eos_token_id


def text_group(row: Mapping[str, Any], prompt_id: str) -> Group:
    """Return a chunk as a group of one; its first token is context, since nothing predicts it."""
    first, *rest = row[_TOKENS].tolist()
    said = TokenSpan(tuple(rest), "policy", (0.0,) * len(rest), version=0)
    noted = {"metrics": {_SPECIAL: row[_SPECIAL]}} if _SPECIAL in row else {}
    return Group(
        prompt_id, (Trajectory(prompt_id, (TokenSpan.context([first]), said), (), {}, 0.0, "done", noted),)
    )
