"""Read datasets in any stored form as rows with `prompt_id`, `messages` and what is learned from them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl4llm.core.base_algorithm import LearnsFrom
from rl4llm.core.errors import ConfigError, DataError, unknown
from rl4llm.core.message import MEDIA, UNSEEN, ReadPicture, is_media
from rl4llm.core.registry import load
from rl4llm.core.types import ChatMessage
from rl4llm.data.columns import (
    FUNCTIONS,
    IMAGES,
    TOOLS,
    has_column,
    messages_in,
    picture_columns,
    shown_columns,
    value_at,
)
from rl4llm.data.read import Located, read_rows

if TYPE_CHECKING:
    from rl4llm.data.images import RowImages

Row = dict[str, Any]
Messages = list[ChatMessage]
PROMPT_COLUMNS = ("messages", "prompt", "conversations")
"""Columns of prompts or conversations, the first that a row has, where `data.prompt_column` names none."""

SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns with the system prompt of a row, as text or text parts."""

ROW_READERS: Mapping[LearnsFrom, str] = {
    "episodes": "rl4llm.data.load:RowReader",
    "demonstrations": "rl4llm.data.answers:Conversations",
    "worlds": "rl4llm.data.answers:Worlds",
    "conversations": "rl4llm.data.answers:WholeConversations",
    "pairs": "rl4llm.data.answers:Pairs",
    "comparisons": "rl4llm.data.answers:Comparisons",
    "labels": "rl4llm.data.answers:Labels",
}
"""The class that reads a stored row, by what an algorithm learns from."""

SEES: tuple[LearnsFrom, ...] = ("episodes", "demonstrations", "conversations")
"""What algorithms learn from that may have images."""

_OF_ROWS = (LookupError, TypeError, ValueError, AttributeError)
"""What code raises for a row whose columns hold something else than it reads."""

OR_SKIP = "Or set data.bad_rows=skip to leave out rows with such faults."


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """Prompts in order; each row is a dict with `prompt_id`, `messages` (dicts), `ground_truth` and the other columns.

    Rows of a file are kept as bytes, which take a third of the memory of dicts, and become dicts when they are read.
    """

    rows: tuple[Row | bytes, ...]
    source: str
    places: tuple[str, ...] = ()  # of each row, such as train.jsonl:17
    skipped: tuple[str, ...] = ()  # why each row was left out that data.bad_rows=skip skipped

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Rows(self.rows[index], self.source, self.places[index])
        row = self.rows[index]
        return pickle.loads(row) if isinstance(row, bytes) else row


def load_rows(
    source: Any,
    *,
    split: str = "train",
    limit: int | None = None,
    learns_from: LearnsFrom = "episodes",
    bad_rows: Literal["stop", "skip"] = "stop",
    images: bool = False,
    **columns: str | None,
) -> Rows:
    r"""Read prompts from rows, a `datasets.Dataset`, a file, a directory, or the hub.

        load_rows("openai/gsm8k:main", prompt_column="question", answer_column="answer", answer_pattern=r"####\s*(.+)")

    docs/rows.md has the columns that are read. The prompt is messages, or a text inside `prompt_template`, in both cases
    after `system_prompt`. The ground truth is the first group of `answer_pattern`, if given. A dot leads into a nested
    column, such as ``reward_model.ground_truth``. All other columns are kept and passed to the rewards.

    A row's `prompt_id` is its column `prompt_id` or `id`. Other rows are named by a hash of their stored prompt and answer,
    so the name does not depend on the system prompt or the order. Rows with the same name get the suffixes -2, -3 ...

    `learns_from` tells what the rows are for, see `rl4llm.data.answers`. With `images`, rows may have images, see
    `rl4llm.data.images.RowImages`. `limit` takes the first rows. With `bad_rows="skip"`, rows with a fault are left out, and
    `skipped` says why; by default the first of them raises DataError with its file and line.
    Raises ConfigError for options that cannot work.
    """
    sees = images and learns_from in SEES
    reader: RowReader = load(ROW_READERS[learns_from])(**columns, home=_directory_of(source), sees=sees)
    name = str(source) if isinstance(source, str | os.PathLike) else type(source).__name__
    faults: list[str] = []
    prompts = _prompts(reader, read_rows(source, split), faults, skip=bad_rows == "skip")
    of_file = isinstance(source, str | os.PathLike)
    rows: list[Row | bytes] = []
    places: list[str] = []
    for where, row in islice(prompts, limit):
        rows.append(pickle.dumps(row, pickle.HIGHEST_PROTOCOL) if of_file else row)
        places.append(where)
    if not rows:
        why = (
            f"all {len(faults)} rows were skipped; the first: {faults[0]}"
            if faults
            else "the dataset is empty"
        )
        raise DataError(f"{name}: {why} (split {split!r}). Next step: check data.path and data.split.")
    return Rows(tuple(rows), name, tuple(places), tuple(faults))


@dataclass(frozen=True, slots=True)
class RowReader:
    """Make prompts of episodes from stored rows; subclasses in `rl4llm.data.answers` read other datasets."""

    prompt_column: str | None = None
    answer_column: str | None = None
    answer_pattern: str | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    home: Path = Path(os.devnull)  # the directory of images whose rows name them
    sees: bool = False  # whether rows may have images
    images: RowImages | None = None  # those of the row that is read

    def __post_init__(self) -> None:
        try:
            template = "{prompt}" if self.prompt_template is None else self.prompt_template
            if "<the prompt>" not in template.format(prompt="<the prompt>"):
                raise ConfigError("data.prompt_template has no {prompt}, the place of the prompt.")
            if not re.compile(self.answer_pattern or "()").groups:
                raise ConfigError("data.answer_pattern has no group around the answer.")
        except (LookupError, ValueError, AttributeError) as error:
            reason = "data.prompt_template has other braces than {prompt}. Write them as {{ and }}."
            raise ConfigError(reason) from error
        except re.error as error:
            reason = f"data.answer_pattern={self.answer_pattern!r} is not a regular expression: {error}."
            raise ConfigError(reason) from error

    def named(self, row: Any) -> tuple[str, Row]:
        """Return the prompt of a stored row, and its name, which equal rows share; raises DataError for an invalid row."""
        if not isinstance(row, Mapping):
            hint = "like {'prompt': ...}; for pandas table.to_dict('records')"
            raise DataError(f"a row must be a mapping of columns, {hint}, not {row!r:.60}.")
        if row.get(FUNCTIONS) and not row.get(TOOLS):  # the older name of OpenAI
            row = {**row, TOOLS: row[FUNCTIONS]}
        if not self.sees:
            return self._named(row)
        columns = {name: row[name] for name in picture_columns(row, self.home)}
        reader = replace(self, images=load("rl4llm.data.images:RowImages")(columns, self.home))
        unused = {name for name in IMAGES if row.get(name) is None or is_media(row[name])}
        return reader._named({name: value for name, value in row.items() if name not in {*columns, *unused}})

    def _named(self, row: Mapping[str, Any]) -> tuple[str, Row]:
        pictures = () if self.sees else picture_columns(row, self.home)
        unseen = [*pictures, *(name for name in MEDIA if is_media(row.get(name)))]
        if unseen:
            raise DataError(f"the column {unseen[0]!r} holds pictures, videos or sounds, {UNSEEN}")
        messages, answers, stored = self.read(row)
        if self.images is not None:
            messages = self.images.placed(messages)
            pictures = [hashlib.sha256(each.data).hexdigest() for item in messages for each in item.pictures]
            stored = (stored, pictures) if pictures else stored
        messages = self.with_system_prompt(row, messages)
        if messages or "text" not in answers:
            self.check(messages)
        columns = {
            "messages": [message.to_dict() for message in messages],
            "ground_truth": self.ground_truth(row),
            **answers,
            **shown_columns(row),
        }
        columns |= {column: value for column, value in row.items() if column not in {*columns, "prompt_id"}}
        # a lone surrogate raises UnicodeEncodeError here, and not when a tokenizer reads the row in the middle of a run
        json.dumps(columns, ensure_ascii=False, skipkeys=True, default=lambda value: None).encode()
        text = json.dumps(stored, sort_keys=True, default=_as_text)
        name = str(next((row[key] for key in ("prompt_id", "id") if row.get(key) not in (None, "")), ""))
        return name or hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), columns

    def with_system_prompt(self, row: Mapping[str, Any], messages: Messages) -> Messages:
        """Return messages after the system prompt of the row's column or the configuration; a row has one of them."""
        columns = [name for name in SYSTEM_COLUMNS if row.get(name) and _is_text(row[name])]
        prompts = (conversation(name, [{"role": "system", "content": row[name]}]) for name in columns)
        texts = [message.content for (message,) in prompts if message.content.strip()]
        systems = [message.content for message in messages if message.role == "system"]
        if self.system_prompt and (texts or systems):
            raise DataError("the row already has a system message. Leave data.system_prompt unset.")
        if texts and len({text.strip() for text in (*texts, *systems[:1])}) > 1:
            raise DataError(f"the row has a system message and another in a column ({texts[-1]!r:.40}).")
        text = self.system_prompt or (None if systems or not texts else texts[0])
        return [ChatMessage("system", text), *messages] if text and messages else messages

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        """Return the messages, the columns made from the row, and what the hash of its name covers."""
        given = sorted((name for name in PROMPT_COLUMNS if name in row), key=lambda name: row[name] is None)
        column = self.prompt_column or next(iter(given), None)
        if column is None:
            names = ", ".join(map(str, row))
            raise DataError(
                f"the row has {names}. Next step: set data.prompt_column to the column of the prompt."
            )
        prompt = self.prompt(row, column)
        answer = self.answer_column or "ground_truth"
        truth = value_at(row, answer) if has_column(row, answer) else None
        return prompt, {}, (value_at(row, column), truth)

    def check(self, messages: Messages) -> None:
        """Raise DataError for messages that do not end with one to answer."""
        if messages and messages[-1].role == "assistant":
            raise DataError(
                "the prompt ends with a message of role 'assistant'. Remove that message, or set algorithm.name=sft."
            )
        if not messages or messages[-1].is_empty:
            raise DataError("the prompt is empty. It must end with a message to answer.")

    def ground_truth(self, row: Mapping[str, Any]) -> Any:
        """Return what the rewards compare an answer with; None if the row has none, which some rewards refuse later."""
        column = self.answer_column or "ground_truth"
        named = self.answer_column is not None or has_column(row, column)
        answer = _column(row, "data.answer_column", column) if named else None
        if self.answer_pattern is None:
            return answer
        match = re.search(self.answer_pattern, answer) if isinstance(answer, str) else None
        if match is None or match[1] is None:
            raise DataError(
                f"column {column!r} does not match data.answer_pattern: {answer!r:.60}. Next: change the pattern."
            )
        return match[1]

    def prompt(self, row: Mapping[str, Any], column: str) -> Messages:
        """Return the messages of a column, or its text as the user's message, inside `prompt_template`."""
        prompt = _column(row, "data.prompt_column", column)
        if self.prompt_template is None:  # which wraps a text, whatever it is
            prompt = messages_in(prompt, column)
        if prompt is None:
            return [ChatMessage("user", "")]
        if not isinstance(prompt, str) or (column == "messages" and self.prompt_column is None):
            if self.prompt_template is not None:
                raise ConfigError(f"data.prompt_template wraps texts, but the column {column!r} has none.")
            return conversation(column, prompt, self.images)
        if prompt.strip() and self.prompt_template is not None:
            prompt = self.prompt_template.format(prompt=prompt)
        return [ChatMessage("user", prompt)]


def conversation(column: str, stored: Any, picture: ReadPicture | None = None) -> Messages:
    """Return the messages of a column; raises DataError, with the place, for anything else.

    `picture` reads the images of their parts, which are refused without it.
    """
    stored = messages_in(stored, column, only=True)  # each fault of the list is named
    if not isinstance(stored, list | tuple) or not all(isinstance(message, Mapping) for message in stored):
        raise DataError(f"{column} must be a list of messages with 'role' and 'content', not {stored!r:.60}.")
    messages: Messages = []
    for number, item in enumerate(stored, start=1):
        try:
            message = ChatMessage.from_dict(item, picture)
        except DataError as error:
            raise DataError(f"message {number} of {column}: {error}") from error
        calls = message.tool_calls if message.role == "assistant" and not message.content else None
        if calls and messages and messages[-1].role == "assistant" and messages[-1].tool_calls:
            # calls that were made together, which ShareGPT's form stores one by one
            messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, *calls))
        else:
            messages.append(message)
    return messages


def _prompts(
    reader: RowReader, located: Iterator[Located], faults: list[str], *, skip: bool
) -> Iterator[tuple[str, Row]]:
    """Yield the prompts of stored rows with their places; names that several share get a number from the second on.

    With `skip`, put the faults of bad rows into `faults` instead of raising them.
    """
    used: set[str] = set()
    copies: Counter[str] = Counter()
    for where, row in located:
        try:
            name, columns = reader.named(row)
        except (DataError, *_OF_ROWS) as error:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}."
            if not skip:
                raise DataError(f"{where}: {reason} {OR_SKIP}") from error
            faults.append(f"{where}: {reason}")
            continue
        prompt_id = name
        while prompt_id in used:
            copies[name] += 1
            prompt_id = f"{name}-{copies[name] + 1}"
        used.add(prompt_id)
        yield where, {"prompt_id": prompt_id, **columns}


def _as_text(value: Any) -> str:
    """Return what stands for a value that is no JSON; the text of an image of Pillow would be another one in each run."""
    return type(value).__name__ if hasattr(value, "save") else str(value)


def _directory_of(source: Any) -> Path:
    """Return the directory below which the rows of a source may name files; that of a dataset in memory is empty."""
    path = Path(source) if isinstance(source, str | os.PathLike) else Path(os.devnull)
    return path if path.is_dir() or path == Path(os.devnull) else path.parent


def _column(row: Mapping[str, Any], option: str, column: str) -> Any:
    if not has_column(row, column):
        nested = [f"{name}.{key}" for name, item in row.items() if isinstance(item, Mapping) for key in item]
        raise DataError(f"{unknown(option, column, [*map(str, row), *nested])}")
    return value_at(row, column)


def _is_text(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [{"text": value}]
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)
