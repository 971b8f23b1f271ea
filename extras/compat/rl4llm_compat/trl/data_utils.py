"""The functions of `trl.data_utils`: what form a row of a data set has, and how it becomes another one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rl4llm.core.errors import DataError

ANSWERS = ("completion", "chosen", "rejected")
MESSAGES = ("messages", "conversations", "prompt", *ANSWERS)
Row = Mapping[str, Any]


def is_conversational(example: Row) -> bool:
    """Return whether the texts of a row are messages with a role.

    >>> is_conversational({"prompt": [{"role": "user", "content": "Hi"}]}), is_conversational({"prompt": "Hi"})
    (True, False)
    """
    return _holds(example, "role")


def is_conversational_from_value(example: Row) -> bool:
    """Return whether a row has `conversations` of messages with `from` instead of `role`."""
    return "conversations" in example and _holds(example, "from")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """Return a row whose messages have `role` and `content` for `from` and `value`; `conversations` become `messages`."""
    names = {"from": "role", "value": "content"}
    row = {"messages" if name == "conversations" else name: value for name, value in example.items()}
    for name in MESSAGES if _holds(example, "from") else ():
        if name in row:
            row[name] = [
                {names.get(key, key): value for key, value in message.items()} for message in row[name]
            ]
    return row


def apply_chat_template(
    example: Row, processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Return the row with a string for each list of messages, and `text` for `messages`.

    A prompt ends where the assistant's answer begins, and an answer is the rest; a prompt whose last message is the
    assistant's stays open. `chat_template_kwargs` of the row are variables of the template, as `template_kwargs` are.
    """
    variables = {**template_kwargs, **(example.get("chat_template_kwargs") or {}), "tools": tools or None}

    def text(messages: Any, **how: bool) -> str:
        return str(processing_class.apply_chat_template(list(messages), tokenize=False, **how, **variables))

    if "messages" in example:
        return {"text": text(example["messages"])}
    answers = {name: example[name] for name in ANSWERS if name in example}
    kept = {"label": example["label"]} if "label" in example else {}
    if "prompt" not in example:
        if not answers:
            raise DataError(f"The row has none of {', '.join(MESSAGES)}, but {', '.join(example)}.")
        return {name: text(answer) for name, answer in answers.items()} | kept
    prompt = list(example["prompt"])
    stays_open = prompt[-1]["role"] == "assistant"
    asked = text(prompt, add_generation_prompt=not stays_open, continue_final_message=stays_open)
    wholes = {name: text([*prompt, *answer]) for name, answer in answers.items()}
    shared = os.path.commonprefix([asked, *wholes.values()])  # noqa: RUF071 - characters are meant
    return {"prompt": shared, **{name: whole[len(shared) :] for name, whole in wholes.items()}} | kept


def maybe_apply_chat_template(
    example: Row, processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> Row:
    """Apply the chat template to a row of messages; return other rows unchanged."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def extract_prompt(example: Row) -> dict[str, Any]:
    """Return what `chosen` and `rejected` begin with as `prompt`, and the rest of both, which is never empty.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is red."})["prompt"]
    'The sky is'
    """
    chosen, rejected = example["chosen"], example["rejected"]
    most = max(0, min(len(chosen), len(rejected)) - 1)
    end = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    if isinstance(chosen, str) and chosen[:end].endswith(" "):
        end -= 1
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def maybe_extract_prompt(example: Row) -> Row:
    """Extract the prompt of a pair that has none; return other rows unchanged."""
    implicit = "prompt" not in example and {"chosen", "rejected"} <= example.keys()
    return extract_prompt(example) if implicit else example


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Return a data set with two rows for each pair: its chosen answer with `label` true, and its rejected one."""
    return dataset.map(_labelled, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None
) -> Any:
    """Unpair a data set of pairs; return another one unchanged. One with splits is judged by its first."""
    first = next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset
    if not {"chosen", "rejected"} <= set(first.column_names):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def _labelled(pairs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return a batch of pairs as answers with labels."""
    chosen, rejected = pairs["chosen"], pairs["rejected"]
    others = {name: column * 2 for name, column in pairs.items() if name not in ("chosen", "rejected")}
    labels = [True] * len(chosen) + [False] * len(rejected)
    return {**others, "completion": chosen + rejected, "label": labels}


def _holds(example: Row, key: str) -> bool:
    """Return whether the first column of messages has messages with this key."""
    value = next((example[name] for name in MESSAGES if name in example), None)
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and key in value[0]
