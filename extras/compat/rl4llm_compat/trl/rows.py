"""TRL's datasets: a column `prompt` of messages or strings, or the messages of a whole conversation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.data.read import read_rows
from rl4llm_compat.trl import images
from rl4llm_compat.trl.data_utils import ANSWERS, is_conversational, maybe_extract_prompt

PLAIN = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def is_plain(rows: Any) -> bool:
    """Return whether prompts are strings that TRL continues without a chat template; the first row decides."""
    return _is_rows(rows) and isinstance(rows[0].get("prompt"), str)


def is_of_conversations(rows: Any) -> bool:
    """Return whether rows are whole conversations."""
    return _is_rows(rows) and "messages" in rows[0]


def show_images(rows: Any) -> bool:
    """Return whether rows have images; the first row decides."""
    return _is_rows(rows) and images.has_images(rows[0])


def count(rows: Any) -> int | None:
    """Return the number of rows, if it is known before reading them."""
    return len(rows) if _is_rows(rows) else None


def prepared(rows: Any) -> Any:
    """Return streamed rows as a list, and with a prompt pairs of strings without one; other rows stay unchanged."""
    streamed = isinstance(rows, Iterable) and not hasattr(rows, "__len__")
    rows = [row for _, row in read_rows(rows, "train")] if streamed else rows
    chosen = rows[0].get("chosen") if _is_rows(rows) and "prompt" not in rows[0] else None
    if not isinstance(chosen, str) or "\n\nAssistant:" in chosen:  # which is a dialogue
        return rows
    return [{**row, **maybe_extract_prompt(row)} for _, row in read_rows(rows, "train")]


def trainable(model: Any, algorithm: str) -> Any:
    """Return the model that a trainer starts from: the directory of a classifier or of a model of images, others unchanged.

    Raises ConfigError for a classifier with several labels, or of another trainer.
    """
    if images.sees_images(model):
        return source(model)
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return model
    if model.config.num_labels != 1:
        raise ConfigError(
            f"The classifier has {model.config.num_labels} labels, but reward models require `num_labels=1`. Load it so."
        )
    if algorithm != "reward_model":
        raise ConfigError(
            f"A {type(model).__name__} cannot generate. Pass it to RewardTrainer or in reward_funcs."
        )
    return source(model)


def prompts(rows: Any, plain: bool) -> Any:
    """Return rows with `messages` and `ground_truth` from TRL's prompts; paths and rows with messages stay unchanged.

    Raises DataError if strings and messages are mixed.
    """
    if not _is_rows(rows) or "prompt" not in rows[0]:
        return rows
    return [_prompt(number, row, plain) for number, (_, row) in enumerate(read_rows(rows, "train"))]


def _prompt(number: int, row: Mapping[str, Any], plain: bool) -> dict[str, Any]:
    prompt = row.get("prompt")
    if isinstance(prompt, str) is not plain or not isinstance(prompt, str | list | tuple):
        kind = "a string" if plain else "messages"
        raise DataError(
            f"row {number}: the prompt is {prompt!r:.60}, but the first row has {kind}. Use the same form in all rows."
        )
    if plain and images.has_images(row):
        raise DataError(
            f"row {number}: the row has images, so its prompt must be messages, not a string. Next: write it as "
            "[{'role': 'user', 'content': ...}], without the chat template."
        )
    messages = [{"role": "user", "content": prompt}] if plain else images.placed(row, list(prompt))
    others = {name: value for name, value in row.items() if name != "prompt"}
    truth = others.get("ground_truth")
    return {**others, "messages": messages, "ground_truth": "" if truth is None else truth}


def as_they_are(rows: Any, plain: bool) -> Any:
    """Return rows unchanged: pairs and labelled answers are read in TRL's forms anyway."""
    return rows


READERS: Mapping[str, Callable[[Any, bool], Any]] = {"grpo": prompts, "rloo": prompts}
"""By the trainer's algorithm: convert TRL's rows, given whether their prompts are strings."""


def source(model: Any) -> str:
    """Return where a model and its tokenizer were loaded from. Raises ConfigError if that is unknown."""
    if isinstance(model, str | Path):
        return str(model)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise ConfigError(
            "The model was not loaded from a directory or the hub. Pass its tokenizer too (processing_class)."
        )
    return name


def plain_text(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer whose chat template is just the texts, with the end token after an answer.

    Tokens that it adds before a text, it adds before the first one.
    """
    copied = copy.deepcopy(tokenizer)
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    copied.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN
    return copied


def strings(rows: Any, algorithm: str) -> dict[str, str]:
    """Return the strings of the first row that are trained on or continued, by column; none if it has messages."""
    if not _is_rows(rows) or is_conversational(rows[0]):
        return {}
    columns = ("prompt",) if READERS.get(algorithm) is prompts else ("prompt", "text", *ANSWERS)
    return {name: rows[0][name] for name in columns if isinstance(rows[0].get(name), str)}


def _is_rows(rows: Any) -> bool:
    if rows is None or isinstance(rows, str | Path | Mapping) or not hasattr(rows, "__len__"):
        return False
    return len(rows) > 0 and isinstance(rows[0], Mapping)
