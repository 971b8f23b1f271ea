"""Datasets: rows with `prompt_id`, `messages` and what is learned from them, from whatever form they are stored in."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from rl4llm.core.base_algorithm import LearnsFrom
from rl4llm.core.errors import ConfigError, DataError, unknown
from rl4llm.core.types import ChatMessage
from rl4llm.data.answers import SPLITS, Messages, answer_of, conversation
from rl4llm.data.read import read_rows

Row = dict[str, Any]
CONVERSATIONS = ("demonstrations", "worlds", "conversations")


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """Prompts in order. A row is a dict with `prompt_id`, `messages` (dicts), `ground_truth` and the other columns."""

    rows: tuple[Row, ...]
    source: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> Any:
        return Rows(self.rows[index], self.source) if isinstance(index, slice) else self.rows[index]

    @property
    def columns(self) -> list[str]:
        """Names of the first row's columns."""
        return list(self.rows[0])


def load_rows(
    source: Any,
    *,
    split: str = "train",
    prompt_column: str | None = None,
    answer_column: str | None = None,
    answer_pattern: str | None = None,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    limit: int | None = None,
    learns_from: LearnsFrom = "episodes",
) -> Rows:
    r"""Read prompts from rows, a `datasets.Dataset`, a file, a directory, or the hub.

        load_rows("openai/gsm8k:main", prompt_column="question", answer_column="answer", answer_pattern=r"####\s*(.+)")

    Rows have `messages` and `ground_truth` already, or get them from `prompt_column` (behind `system_prompt`, through
    `prompt_template` with its ``{prompt}``) and from `answer_column` (the first group of `answer_pattern`, if given).
    All other columns are kept; they reach the rewards.

    A row's `prompt_id` is its column `prompt_id` or `id`, which no two rows may share. Rows without one are named by a hash
    of their prompt and answer as stored, so the name survives another system prompt or order; rows that are equal in both
    get -2, -3 ... behind it.

    `learns_from` says what the rows are for. Only "episodes" need a ground truth. "demonstrations", "worlds" and
    "conversations" hold the assistant's messages, or a prompt and the answer to it in `answer_column` or "completion";
    "pairs" and "labels" hold answers beside the prompt. A prompt's column is `prompt_column`, "prompt" or "messages", see
    `rl4llm.data.answers`.
    `limit` takes the first rows. Raises ConfigError for options that cannot work, DataError, with the row's file and line,
    for anything wrong with the data.
    """
    recipe = _Recipe(prompt_column, answer_column, answer_pattern, system_prompt, prompt_template, learns_from)
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit={limit} is not accepted: at least 1, or null for all rows.")
    name = str(source) if isinstance(source, str | os.PathLike) else type(source).__name__
    rows = tuple(_with_ids(recipe.draft(where, row) for where, row in islice(read_rows(source, split), limit)))
    if not rows:
        raise DataError(f"{name}: the dataset is empty (split {split!r}). Next step: check data.path and data.split.")
    return Rows(rows, name)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prompt whose name is not settled: equal rows share a `content_hash`."""

    where: str
    given_id: str | None
    content_hash: str
    row: Row


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a stored row becomes a prompt."""

    prompt_column: str | None
    answer_column: str | None
    answer_pattern: str | None
    system_prompt: str | None
    prompt_template: str | None
    learns_from: LearnsFrom

    def __post_init__(self) -> None:
        if self.prompt_template is not None:
            self._check_template(self.prompt_template)
        if self.answer_pattern is not None:
            _check_pattern(self.answer_pattern)

    def draft(self, where: str, row: Any) -> _Draft:
        """The prompt that a stored row makes; raises DataError."""
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: a row must have named columns, like {{'prompt': ...}}; this is {row!r:.60}.")
        if self.learns_from in SPLITS:
            messages, answers = SPLITS[self.learns_from](where, row, self._prompt_beside(where, row))
            stored: tuple[Any, ...] = [message.to_dict() for message in messages], answers
        elif self.learns_from in CONVERSATIONS and (self.prompt_column or "messages" not in row):
            messages, answers = self._told(where, row), {}
            stored = ([message.to_dict() for message in messages],)
        else:
            messages, answers = self._stored_or_made(where, row), {}
            stored = row[self.prompt_column or "messages"], row.get(self.answer_column or "ground_truth")
        messages = self._checked(where, messages)
        ground_truth = self._ground_truth(where, row)
        made = {"messages": [message.to_dict() for message in messages], "ground_truth": ground_truth, **answers}
        made |= {column: value for column, value in row.items() if column not in {*made, "prompt_id"}}
        for text in _texts(made):
            _check_text(where, text)
        return _Draft(where, _given_id(where, row), _hash(stored), made)

    def _stored_or_made(self, where: str, row: Mapping[str, Any]) -> Messages:
        return self._stored(where, row) if self.prompt_column is None else [self._prompt(where, row, self.prompt_column)]

    def _told(self, where: str, row: Mapping[str, Any]) -> Messages:
        """A conversation of a prompt and the answer to it, each in a column of its own, as texts or messages."""
        column = self.answer_column or "completion"
        prompt = self._prompt_beside(where, row)
        if prompt is None or column not in row:
            raise DataError(
                f"{where}: there is no conversation. Accepted: a column 'messages', or 'prompt' and 'completion' (others: "
                f"data.prompt_column, data.answer_column). The row has: {', '.join(map(str, row))}."
            )
        if any(message.role == "assistant" for message in prompt):
            raise DataError(f"{where}: the prompt has answers of the assistant, which would be learned too. Use messages.")
        return [*prompt, *answer_of(where, row, column)]

    def _prompt_beside(self, where: str, row: Mapping[str, Any]) -> Messages | None:
        """The prompt of a row that holds answers too; None where it has no column of its own."""
        column = self.prompt_column or next((name for name in ("prompt", "messages") if row.get(name) is not None), None)
        if column is None or not isinstance(row.get(column), list | tuple):
            return None if column is None else [self._prompt(where, row, column)]
        return conversation(where, column, row[column])

    def _checked(self, where: str, messages: Messages) -> Messages:
        if self.learns_from in CONVERSATIONS:
            if not any(message.role == "assistant" for message in messages):
                raise DataError(f"{where}: the conversation has no assistant message, so there is nothing to imitate.")
            _check_turns(where, messages)
        elif not messages or messages[-1].role == "assistant" or not messages[-1].content.strip():
            raise DataError(f"{where}: the prompt is empty: it must end with a message that says something to answer.")
        if self.system_prompt:
            if any(message.role == "system" for message in messages):
                raise DataError(f"{where}: the row has a system message of its own; leave data.system_prompt unset.")
            return [ChatMessage("system", self.system_prompt), *messages]
        return messages

    def _stored(self, where: str, row: Mapping[str, Any]) -> Messages:
        if "messages" not in row:
            raise DataError(
                f"{where}: there is no column 'messages'. Next step: say which column holds the prompt "
                f"(data.prompt_column); there are: {', '.join(map(str, row))}."
            )
        if self.prompt_template is not None:
            raise ConfigError("data.prompt_template needs data.prompt_column, whose text it is put around.")
        return conversation(where, "messages", row["messages"])

    def _prompt(self, where: str, row: Mapping[str, Any], column: str) -> ChatMessage:
        prompt = _column(where, row, "data.prompt_column", column)
        if not isinstance(prompt, str):
            raise DataError(f"{where}: column {column!r} must be a text, not {prompt!r:.60}.")
        if prompt.strip() and self.prompt_template is not None:
            prompt = self.prompt_template.format(prompt=prompt)
        return ChatMessage("user", prompt)

    def _ground_truth(self, where: str, row: Mapping[str, Any]) -> Any:
        if self.learns_from != "episodes":
            return row.get(self.answer_column or "ground_truth")
        column = self.answer_column or "ground_truth"
        answer = _column(where, row, "data.answer_column", column)
        if answer is None:
            raise DataError(f"{where}: column {column!r} is empty.")
        if self.answer_pattern is None:
            return answer
        found = re.search(self.answer_pattern, answer) if isinstance(answer, str) else None
        if found is None or found[1] is None:
            raise DataError(
                f"{where}: column {column!r} does not match data.answer_pattern={self.answer_pattern!r}: "
                f"{answer!r:.60}."
            )
        return found[1]

    @staticmethod
    def _check_template(template: str) -> None:
        try:
            shows = "<the prompt>" in template.format(prompt="<the prompt>")
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"data.prompt_template={template!r} has braces other than {{prompt}}; write those as {{{{ and }}}}."
            ) from error
        if not shows:
            raise ConfigError(f"data.prompt_template={template!r} has no {{prompt}}, the place where the prompt goes.")


def _check_turns(where: str, messages: Messages) -> None:
    """Somebody else speaks between two answers."""
    for number, (before, after) in enumerate(pairwise(messages), start=1):
        if before.role == after.role == "assistant":
            raise DataError(
                f"{where}: messages {number} and {number + 1} are both the assistant's, and nobody spoke between them. "
                "Next step: make one of them, or leave the row out."
            )


def _with_ids(drafts: Iterator[_Draft]) -> Iterator[Row]:
    first: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for draft in drafts:
        prompt_id = draft.given_id
        if prompt_id is None:
            copies[draft.content_hash] += 1
            copy = copies[draft.content_hash]
            prompt_id = draft.content_hash if copy == 1 else f"{draft.content_hash}-{copy}"
        if prompt_id in first:
            raise DataError(
                f"{draft.where}: the prompt_id {prompt_id!r} is that of {first[prompt_id]} already; ids must differ."
            )
        first[prompt_id] = draft.where
        yield {"prompt_id": prompt_id, **draft.row}


def _given_id(where: str, row: Mapping[str, Any]) -> str | None:
    column = next((name for name in ("prompt_id", "id") if name in row), None)
    if column is None:
        return None
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {column}={value!r:.60} is not accepted: a text or a whole number.")
    return str(value)


def _hash(stored: Any) -> str:
    text = json.dumps(stored, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _column(where: str, row: Mapping[str, Any], option: str, column: str | None) -> Any:
    if column is None or column not in row:
        raise DataError(f"{where}: {unknown(option, str(column), map(str, row))}")
    return row[column]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.keys()))
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        raise DataError(f"{where}: {around!r} has half of a surrogate pair, which is no character.") from error


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"data.answer_pattern={pattern!r} is not a regular expression: {error}.") from error
    if groups == 0:
        raise ConfigError(f"data.answer_pattern={pattern!r} has no group; put ( ) around the answer.")
