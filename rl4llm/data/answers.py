"""Rows that contain answers: conversations, texts, pairs of a preferred and a rejected answer, and labelled answers.

Pairs have the two forms that TRL reads. `chosen` and `rejected` are whole conversations that start from the same prompt, or
they are what follows a prompt in a separate column, as a string or as messages. Dialogues in one string, with "Human:" and
"Assistant:" in front of each turn, are conversations too. Labelled answers have a prompt, a
`completion` and a `label`, true or false. Rows of function calling have a `query`, `tools`, and the calls in `answers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import dropwhile, groupby, pairwise
from typing import Any

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.schema import NonNegative, fits, refusal
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

    def prompt_column_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the column of the prompt of a row with answers; None if it has none."""
        names = ("prompt", "messages", "conversations")
        return self.prompt_column or next((name for name in names if row.get(name) is not None), None)

    def prompt_beside(self, row: Mapping[str, Any]) -> Messages:
        """Return the prompt of a row with answers, which is in another column."""
        if (column := self.prompt_column_of(row)) is None:
            raise DataError(
                f"the row has no prompt but {', '.join(map(str, row))}. Accepted: a column 'prompt' (another: "
                "data.prompt_column) beside the answer, whole conversations, or a column 'text' for texts without roles."
            )
        return self.prompt(row, column)


class Conversations(_WithAnswers):
    """Read conversations: messages, or a prompt and its answer in separate columns; or texts without any roles."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        name = self.prompt_column or next((key for key in PROMPT_COLUMNS if row.get(key) is not None), None)
        if not self.prompt_column and name in ("messages", "conversations"):
            return RowReader.read(self, row)
        if name is None and (turns := self.instruction(row)):
            return turns, {}, (_dicts(turns),)
        if name is None and row.get("text") is not None:
            return [], {"text": self.text(row)}, row["text"]
        calling = name is None and bool(row.get(TOOLS)) and {"query", _CALLS} <= row.keys()
        column = self.answer_column or (_CALLS if calling else "completion")
        prompt = self.prompt(row, "query") if calling else self.prompt_beside(row)
        if any(message.role == "assistant" for message in prompt):
            raise DataError("the prompt has answers, which would be learned. Use a column 'messages'.")
        if column == "completion" and str(row.get("label")).lower() == "false":
            raise DataError("label=false marks a bad answer. Remove the row, or use algorithm.name=kto.")
        whole = [*prompt, *_begun(column, answer_of(row, column))]
        return whole, {}, (_dicts(whole),)

    def instruction(self, row: Mapping[str, Any]) -> Messages | None:
        """Return a row of an instruction, an input that may be empty and an answer; None for other rows."""
        answer = self.answer_column or next((name for name in ("output", "response") if name in row), None)
        if answer is None or not isinstance(row.get("instruction"), str):
            return None
        if str(row.get("history") or "").strip("[]()\"', "):
            raise DataError("a column 'history' is not read. Write its turns in a column 'messages'.")
        names = ("instruction", "input", "context")
        texts = [_text(name, row[name]) for name in names if row.get(name) not in (None, [], {})]
        prompt = "\n\n".join(text for text in texts if text.strip())
        if self.prompt_template is not None:
            prompt = self.prompt_template.format(prompt=prompt)
        return [ChatMessage("user", prompt), *answer_of(row, answer)]

    def check(self, messages: Messages) -> None:
        """Raise DataError if nothing can be imitated, or answers follow each other or nothing."""
        roles = [message.role for message in messages]
        learned = dropwhile(lambda message: message.role != "assistant", messages)
        if not any(map(self.learns, learned)):
            raise DataError(
                "nothing of the conversation is learned: it has no answer, or none with a weight."
            )
        self.check_weights(messages)
        check_replies("messages", messages)
        if ("assistant", "assistant") in pairwise(("assistant", *roles)):
            raise DataError("a message of the assistant begins the conversation or follows another one.")

    def learns(self, message: ChatMessage) -> bool:
        """Return whether a message from the first answer on is learned."""
        return message.role == "assistant" and message.learned is not False

    def check_weights(self, messages: Messages) -> None:
        """Raise DataError for messages of others that should be learned, and for questions without an answer."""
        check_learned("messages", messages)
        if any(message.learned and message.role != "assistant" for message in messages):
            raise DataError("a message that is not the assistant's has a weight. Set algorithm.learn=all.")

    def text(self, row: Mapping[str, Any]) -> str:
        """Return a text that is learned as a whole; raise DataError for anything else."""
        if self.system_prompt is not None or self.prompt_template is not None:
            raise ConfigError(
                "data.system_prompt and data.prompt_template have no effect on texts. Remove them."
            )
        if columns := [name for name in _ASKED if row.get(name) not in (None, "")]:
            raise DataError(
                f"the row has a 'text', but also {', '.join(columns)}. Set data.prompt_column and data.answer_column."
            )
        if not (text := _text("text", row["text"])).strip():
            raise DataError("the text is empty. Remove the row.")
        return text


class WholeConversations(Conversations):
    """Read conversations in which all messages after the prompt are learned."""

    def check_weights(self, messages: Messages) -> None:
        """Raise DataError if a run of messages between two answers is learned only in part."""
        runs = groupby(messages, lambda message: message.role == "assistant")
        between = [[message.learned is False for message in run] for is_answer, run in runs if not is_answer]
        start = messages[0].role != "assistant"  # the prompt is not learned
        if any(len({*run}) > 1 for run in between[start:]):
            raise DataError("some messages between two answers have a weight of 0. Give all the same.")

    def learns(self, message: ChatMessage) -> bool:
        return message.learned is not False

    def text(self, row: Mapping[str, Any]) -> str:
        raise ConfigError("a text without roles has no turns. Set algorithm.learn=assistant.")


class Worlds(WholeConversations):
    """Read conversations in which the environment's messages after the first answer are learned."""

    def learns(self, message: ChatMessage) -> bool:
        return message.role != "assistant" and message.learned is not False


class Pairs(_WithAnswers):
    """Read rows with a preferred and a rejected answer to a prompt."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        alone = self.prompt_column_of(row) is None
        chosen, rejected = (answer_of(row, column, alone=alone) for column in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError("chosen and rejected are identical, so neither is preferred. Remove the row.")
        if chosen[0].role != "assistant":
            prompt = _shared_prompt(chosen, rejected, None if alone else self.prompt_beside(row))
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        else:
            prompt = self.prompt_beside(row)
        for column, answer in (("chosen", chosen), ("rejected", rejected)):
            check_learned(column, _begun(column, answer))
        check_replies("chosen", chosen)  # an empty answer may well be the rejected one
        margin = float(row.get("margin") or 0)  # a text in a .csv
        if not fits(margin, NonNegative):
            raise DataError(refusal("margin", margin, NonNegative))
        answers = {"chosen": _dicts(chosen), "rejected": _dicts(rejected), "margin": margin}
        return prompt, answers, (_dicts(prompt), answers)


class Comparisons(Pairs):
    """Read pairs that are compared as a whole, with one value for each conversation."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        prompt, answers, stored = Pairs.read(self, row)
        messages = (*_dicts(prompt), *answers["chosen"], *answers["rejected"])
        if any("weight" in message for message in messages):
            raise DataError("a reward model learns one value for a whole conversation. Remove weights.")
        return prompt, answers, stored


class Labels(_WithAnswers):
    """Read rows with a prompt and an answer that is labelled good or bad."""

    def read(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Any], Any]:
        prompt = self.prompt_beside(row)
        completion = _begun("completion", answer_of(row, "completion"))
        check_learned("completion", completion)
        label = _LABELS.get(str(row.get("label")).lower())
        if label is None:
            raise DataError(f"label={row.get('label')!r:.60} is not accepted. Accepted: true or false.")
        if label:
            check_replies("completion", completion)
        answers = {"completion": _dicts(completion), "label": label}
        return prompt, answers, (_dicts(prompt), answers)


def check_labels(rows: Any, limit: int | None = None) -> None:
    """Raise DataError for labelled answers that are all good or all bad."""
    labels = {row["label"] for row in rows}
    if len(labels) == 1:
        more = "" if limit is None else f", or raise data.limit={limit}"
        label = str(labels.pop()).lower()
        raise DataError(f"{rows.source}: all {len(rows)} rows have label={label}. Add others{more}.")


def answer_of(row: Mapping[str, Any], column: str, *, alone: bool = False) -> Messages:
    """Return the answer in a column, a string or messages, as messages; raises DataError if it is missing or empty.

    An answer that is `alone`, without a prompt in another column, may be a dialogue in one string. The column `answers` of
    a row with tools holds calls: a list of ``{"name": ..., "arguments": ...}``, or its JSON text.
    """
    if not has_column(row, column):
        names = ", ".join(map(str, row))
        raise DataError(f"the column {column!r} is missing. The row has: {names}. Next: rename the column.")
    value = messages_in("" if value_at(row, column) is None else value_at(row, column), column)
    if column == _CALLS and row.get(TOOLS):
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
    if number := empty_reply(messages):
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
    if messages[-1].role in ("user", "system"):  # most often a mislabelled answer
        raise DataError(
            f"{column} ends with a message of the {messages[-1].role}. Correct its role or remove it."
        )


def _shared_prompt(chosen: Messages, rejected: Messages, prompt: Messages | None) -> Messages:
    """Return what two whole conversations have in common, up to the answer in which they differ."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    size = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    while size and chosen[size - 1].role == "assistant":
        size -= 1
    shared = chosen[:size]
    following = {side[size].role for side in (chosen, rejected) if len(side) > size}
    if not shared or following != {"assistant"}:
        raise DataError(
            f"chosen and rejected differ at message {size}, which must be the assistant's in both."
        )
    if prompt is not None:
        adds_system = len(chosen) > len(prompt) and chosen[0].role == "system"  # which the prompt may lack
        start = adds_system and (not prompt or prompt[0].role != "system")
        if chosen[start : len(prompt) + start] != prompt:
            raise DataError("chosen and rejected do not begin with the row's prompt. Correct or remove it.")
    return shared


def _begun(column: str, messages: Messages) -> Messages:
    """Return an answer, which begins with a message of the assistant."""
    if not messages or messages[0].role != "assistant":
        raise DataError(f"{column} must continue with an answer of the assistant.")
    return messages


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):  # bytes have the methods of a text too
        raise DataError(f"column {column!r} must be a string, not {value!r:.60}.")
    return value


def _dicts(messages: Messages) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]
