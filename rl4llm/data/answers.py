"""Rows that contain answers: conversations, texts, pairs of a preferred and a rejected answer, and labelled answers.

Pairs have the two forms that TRL reads. `chosen` and `rejected` are whole conversations that start from the same prompt, or
they are what follows a prompt in a separate column, as a string or as messages. Dialogues in one string, with "Human:" and
"Assistant:" in front of each turn, are conversations too. Labelled answers have a prompt, a
`completion` and a `label`, true or false. Rows of function calling have a `query`, `tools`, and the calls in `answers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.columns import TOOLS, has_column, messages_in, value_at
from rl4llm.data.load import PROMPT_COLUMNS, Messages, RowReader, conversation

ANSWER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"),
    "comparisons": ("chosen", "rejected"),
    "labels": ("completion",),
}
"""The columns that contain the answers of a row, by what an algorithm learns from."""

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # text in a .csv

_CALLS = "answers"
"""A column of rows with a `query` and `tools`: the calls that answer the query."""

_ASKED = (
    "instruction", "question", "query", "answer", "output", "response", "completion", "system", "system_prompt",
)  # fmt: skip
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


class _WithAnswers(RowReader):
    """Read rows that contain what is learned, so that no ground truth is needed."""

    def ground_truth(self, row: Mapping[str, Any]) -> Any:
        column = self.answer_column or "ground_truth"
        return value_at(row, column) if has_column(row, column) else None

    def prompt_beside(self, row: Mapping[str, Any]) -> Messages | None:
        """Return the prompt of a row with answers; None if it has no separate column."""
        names = ("prompt", "messages", "conversations")
        column = self.prompt_column or next((name for name in names if row.get(name) is not None), None)
        return None if column is None else self.prompt(row, column)


class Conversations(_WithAnswers):
    """Read conversations: messages, or a prompt and its answer in separate columns; or texts without any roles."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        name = self.prompt_column or next((key for key in PROMPT_COLUMNS if row.get(key) is not None), None)
        if not self.prompt_column and name in ("messages", "conversations"):
            messages, answers, stored = RowReader.read(self, row)
            if not messages:
                raise DataError(f"{name} is empty, so there is nothing to imitate. Remove the row.")
            return messages, answers, stored
        if name is None and (turns := self.instruction(row)):
            return turns, {}, (_dicts(turns),)
        if name is None and row.get("text") is not None:
            return [], {"text": self.text(row)}, row["text"]
        calling = name is None and bool(row.get(TOOLS)) and {"query", _CALLS} <= row.keys()
        column = self.answer_column or (_CALLS if calling else "completion")
        prompt = self.prompt(row, "query") if calling else self.prompt_beside(row)
        if prompt is None or not has_column(row, column):
            raise DataError(
                "the row has no conversation. Accepted: a column 'messages' or 'conversations'; 'prompt' and "
                "'completion' (others: data.prompt_column, data.answer_column); 'query', 'tools' and 'answers'; or 'text' "
                f"for a text without roles. The row has: {', '.join(map(str, row))}."
            )
        if any(message.role == "assistant" for message in prompt):
            raise DataError("the prompt has answers, which would be learned. Use a column 'messages'.")
        if column == "completion" and str(row.get("label")).lower() == "false":
            raise DataError(
                "label=false marks a bad answer, which would be learned. Remove the row, or use kto."
            )
        answer = answer_of(row, column)
        _check_first(column, answer)
        return [*prompt, *answer], {}, (_dicts([*prompt, *answer]),)

    def instruction(self, row: Mapping[str, Any]) -> Messages | None:
        """Return a row of an instruction, an input that may be empty and an answer; None for other rows."""
        answer = self.answer_column or next((name for name in ("output", "response") if name in row), None)
        if answer is None or not isinstance(row.get("instruction"), str):
            return None
        if str(row.get("history") or "").strip("[]()\"', "):
            raise DataError(
                "earlier turns in a column 'history' are not read. Write them in a column 'messages'."
            )
        names = ("instruction", "input", "context")
        texts = [_text(name, row[name]) for name in names if row.get(name) not in (None, [], {})]
        prompt = "\n\n".join(text for text in texts if text.strip())
        if self.prompt_template is not None:
            prompt = self.prompt_template.format(prompt=prompt)
        return [ChatMessage("user", prompt), *answer_of(row, answer)]

    def check(self, messages: Messages) -> None:
        """Raise DataError if nothing can be imitated, or answers follow each other or nothing."""
        if not messages:  # a text without roles
            return
        if not any(message.role == "assistant" for message in messages):
            raise DataError("the conversation has no assistant message, so there is nothing to imitate.")
        self.check_learned(messages)
        check_replies("messages", messages)
        for number, message in enumerate(messages, start=1):
            if message.role == "assistant" and (number == 1 or messages[number - 2].role == "assistant"):
                raise DataError(f"message {number} is the assistant's, and no other before it asks for one.")

    def check_learned(self, messages: Messages) -> None:
        """Raise DataError for messages of others that should be learned, or if none of the assistant's is."""
        check_learned("messages", messages)
        for number, message in enumerate(messages, start=1):
            if message.learned and message.role != "assistant":
                raise DataError(
                    f"message {number}, a {message.role}'s, has a weight. Set algorithm.learn=all."
                )

    def text(self, row: Mapping[str, Any]) -> str:
        """Return a text that is learned as a whole; raise DataError for anything else."""
        for name in ("system_prompt", "prompt_template"):
            if getattr(self, name) is not None:
                raise ConfigError(f"data.{name} has no effect on texts (column 'text'). Remove it.")
        if others := [name for name in _ASKED if row.get(name) not in (None, "")]:
            raise DataError(
                f"the row has a 'text', but also {', '.join(others)}. Name prompt and answer with data.prompt_column and "
                "data.answer_column, or keep only the text."
            )
        if not (text := _text("text", row["text"])).strip():
            raise DataError("the text is empty. Remove the row.")
        return text


class WholeConversations(Conversations):
    """Read conversations in which all messages after the prompt are learned."""

    def check_learned(self, messages: Messages) -> None:
        """Raise DataError if nothing is learned, or a run of messages between two answers only in part."""
        first = next(number for number, message in enumerate(messages) if message.role == "assistant")
        for is_answer, run in groupby(messages[first:], lambda message: message.role == "assistant"):
            if not is_answer and len({message.learned is False for message in run}) > 1:
                raise DataError(
                    "some messages between two answers have a weight of 0. Give all of them the same."
                )
        if not any(map(self.learns, messages[first:])):
            raise DataError(
                "nothing of the conversation is learned: no message after the prompt has a weight."
            )

    def learns(self, message: ChatMessage) -> bool:
        """Return whether a message after the prompt is learned."""
        return message.learned is not False

    def text(self, row: Mapping[str, Any]) -> str:
        raise ConfigError("a text without roles (column 'text') has no turns. Set algorithm.learn=assistant.")


class Worlds(WholeConversations):
    """Read conversations in which the environment's messages after the first answer are learned."""

    def learns(self, message: ChatMessage) -> bool:
        return message.role != "assistant" and message.learned is not False


class Pairs(_WithAnswers):
    """Read rows with a preferred and a rejected answer to a prompt."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        prompt = self.prompt_beside(row)
        alone = prompt is None
        chosen, rejected = (answer_of(row, column, alone=alone) for column in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError("chosen and rejected are identical, so neither is preferred. Remove the row.")
        if chosen[0].role != "assistant":
            prompt = _shared_prompt(chosen, rejected, prompt)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        prompt = _checked_prompt(row, prompt)
        for column, answer in (("chosen", chosen), ("rejected", rejected)):
            _check_first(column, answer)
            check_learned(column, answer)
        check_replies("chosen", chosen)  # an empty answer may well be the rejected one
        answers = {"chosen": _dicts(chosen), "rejected": _dicts(rejected), "margin": _margin(row)}
        return prompt, answers, (_dicts(prompt), answers)


class Comparisons(Pairs):
    """Read pairs that are compared as a whole, with one value for each conversation."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        prompt, answers, stored = Pairs.read(self, row)
        messages = (*_dicts(prompt), *answers["chosen"], *answers["rejected"])
        if any("weight" in message for message in messages):
            raise DataError(
                "a reward model learns one value for a whole conversation. Remove the weights of messages."
            )
        return prompt, answers, stored


class Labels(_WithAnswers):
    """Read rows with a prompt and an answer that is labelled good or bad."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        prompt = _checked_prompt(row, self.prompt_beside(row))
        completion = answer_of(row, "completion")
        _check_first("completion", completion)
        check_learned("completion", completion)
        stored = row.get("label")
        label = _LABELS.get(str(stored).lower())
        if label is None:
            raise DataError(f"label={stored!r:.60} is not accepted. Accepted: true (a good answer) or false.")
        if label:
            check_replies("completion", completion)
        answers = {"completion": _dicts(completion), "label": label}
        return prompt, answers, (_dicts(prompt), answers)


def check_labels(rows: Any, limit: int | None = None) -> None:
    """Raise DataError for labelled answers that are all good or all bad."""
    labels = {row["label"] for row in rows}
    if len(labels) == 1:
        label = labels.pop()
        more = "" if limit is None else f", or raise data.limit={limit}"
        raise DataError(
            f"{rows.source}: all {len(rows)} rows have label={str(label).lower()}. Add rows with "
            f"label={str(not label).lower()}{more}."
        )


def answer_of(row: Mapping[str, Any], column: str, *, alone: bool = False) -> Messages:
    """Return the answer in a column, a string or messages, as messages; raises DataError if it is missing or empty.

    An answer that is `alone`, without a prompt in another column, may be a dialogue in one string. The column `answers` of
    a row with tools holds calls: a list of ``{"name": ..., "arguments": ...}``, or its JSON text.
    """
    if not has_column(row, column):
        names = ", ".join(map(str, row))
        raise DataError(f"the column {column!r} is missing. The row has: {names}. Next: rename the column.")
    value = messages_in(value_at(row, column), column)
    if value is None:
        messages = []
    elif column == _CALLS and row.get(TOOLS):
        messages = conversation(column, [{"role": "assistant", "content": "", "tool_calls": value}])
    elif isinstance(value, str):
        messages = (_dialogue(value) if alone else []) or [ChatMessage("assistant", value)]
    else:
        messages = conversation(column, [value] if isinstance(value, Mapping) else value)
    if not messages or (len(messages) == 1 and messages[0].is_empty):
        raise DataError(f"{column} is empty. Fill it in or remove the row.")
    return messages


def _dialogue(text: str) -> Messages:
    r"""Return the turns of a dialogue such as "\n\nHuman: Hi\n\nAssistant: Hello"; [] for any other text."""
    start, *parts = _TURN.split(text)
    if start.strip() or not parts:
        return []
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [ChatMessage(_SPEAKERS[speaker], text.strip()) for speaker, text in turns]


def check_replies(column: str, messages: Messages) -> None:
    """Raise DataError for an assistant message without content and tool calls, which would train empty replies."""
    number = empty_reply(messages)
    if number:
        raise DataError(f"message {number} of {column} is an empty reply. Fill it in or remove the row.")


def empty_reply(messages: Sequence[ChatMessage]) -> int | None:
    """Return the number, from 1, of the first assistant message that is learned and empty, or None."""
    for number, message in enumerate(messages, start=1):
        if message.role == "assistant" and message.is_empty and message.learned is not False:
            return number
    return None


def check_learned(column: str, messages: Messages) -> None:
    """Raise DataError if each of the assistant's messages has a weight of 0, or a user ends the conversation."""
    if all(message.learned is False for message in messages if message.role == "assistant"):
        raise DataError(f"no message of {column} is learned: each answer has a weight of 0. Remove the row.")
    if messages[-1].role in ("user", "system"):  # of which a mislabelled answer is the most frequent cause
        raise DataError(
            f"{column} ends with a message of role {messages[-1].role!r}. Correct its role, or remove it."
        )


def _shared_prompt(chosen: Messages, rejected: Messages, prompt: Messages | None) -> Messages:
    """Return what two whole conversations have in common, up to the answer in which they differ."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    size = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    while size and chosen[size - 1].role == "assistant":
        size -= 1
    shared = chosen[:size]
    following = {side[size].role for side in (chosen, rejected) if len(side) > size}
    if not shared or following != {"assistant"}:
        raise DataError(
            f"chosen and rejected start from different prompts: they first differ at message {size}, which must be the "
            "assistant's in both."
        )
    if prompt is not None:
        adds_system = len(chosen) > len(prompt) and chosen[0].role == "system"  # which the prompt may lack
        start = adds_system and (not prompt or prompt[0].role != "system")
        if chosen[start : len(prompt) + start] != prompt:
            raise DataError("chosen and rejected are conversations that do not begin with the row's prompt.")
    return shared


def _checked_prompt(row: Mapping[str, Any], prompt: Messages | None) -> Messages:
    if prompt is None:
        raise DataError(
            "the row has no prompt. Accepted: a column 'prompt' or 'messages' (another: data.prompt_column), or whole "
            f"conversations in 'chosen' and 'rejected'. The row has: {', '.join(map(str, row))}."
        )
    return prompt


def _check_first(column: str, messages: Messages) -> None:
    if not messages or messages[0].role != "assistant":
        raise DataError(f"{column} must continue with an answer of the assistant.")


def _margin(row: Mapping[str, Any]) -> float:
    """Return the margin of a pair, which is text in a .csv; null is 0. Raises DataError for anything else."""
    try:
        margin = float(row.get("margin") or 0)
    except (TypeError, ValueError):
        margin = math.nan
    if not 0 <= margin < math.inf:
        raise DataError(f"margin={row['margin']!r:.60} is not accepted. Accepted: a number, 0 or more.")
    return margin


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must be a string, not {value!r:.60}.")
    return value


def _dicts(messages: Messages) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]
