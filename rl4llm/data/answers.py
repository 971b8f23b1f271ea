"""Rows that hold answers beside a prompt: two of which one is preferred, or one that is good or bad.

Pairs come in the two forms that TRL reads: `chosen` and `rejected` as whole conversations, which start from the same prompt,
or as what follows on a prompt in a column of its own, a text or messages. Labelled answers have a prompt, a `completion` and
a `label`, true or false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.render import Renderer

Messages = list[ChatMessage]
Split = Callable[[str, Mapping[str, Any], Messages | None], tuple[Messages, dict[str, Any]]]
"""(place, stored row, its prompt if it has a column of one) -> the prompt, and the columns that the reader takes."""


def split_pair(where: str, row: Mapping[str, Any], prompt: Messages | None) -> tuple[Messages, dict[str, Any]]:
    """The prompt of a pair, and its columns `chosen` and `rejected` with what follows on it, and `margin`.

    Raises DataError where a side is missing, both are the same, or they start from different prompts.
    """
    chosen, rejected = (answer_of(where, row, column) for column in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, so nothing is preferred. Remove the row.")
    if chosen[0].role != "assistant":
        prompt = _shared_prompt(where, chosen, rejected, prompt)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    prompt = _checked_prompt(where, row, prompt)
    for column, messages in (("chosen", chosen), ("rejected", rejected)):
        _check_follows(where, column, messages)
    return prompt, {"chosen": _dicts(chosen), "rejected": _dicts(rejected), "margin": _margin(where, row)}


def split_label(where: str, row: Mapping[str, Any], prompt: Messages | None) -> tuple[Messages, dict[str, Any]]:
    """The prompt of a labelled answer, and its columns `completion` and `label`; raises DataError for what is missing."""
    prompt, completion = _checked_prompt(where, row, prompt), answer_of(where, row, "completion")
    _check_follows(where, "completion", completion)
    label = row.get("label")
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise DataError(f"{where}: label={label!r:.60} is not accepted: true for a good answer, false for a bad one.")
    return prompt, {"completion": _dicts(completion), "label": bool(label)}


SPLITS: Mapping[str, Split] = {"pairs": split_pair, "labels": split_label}
"""How a stored row is read, by what an algorithm learns from."""

ANSWER_COLUMNS: Mapping[str, tuple[str, ...]] = {"pairs": ("chosen", "rejected"), "labels": ("completion",)}
"""Where a row that was read has its answers, by what an algorithm learns from."""


def pair_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """The chosen answer with reward 1 and the rejected one with -1; both know the pair's margin."""
    extras = {"margin": row.get("margin", 0.0)}
    sides = (("chosen", 1.0), ("rejected", -1.0))
    return Group(prompt_id, tuple(_answered(renderer, row, column, prompt_id, reward, extras) for column, reward in sides))


def label_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """One answer, with reward 1 if it is good and -1 if it is bad."""
    return Group(prompt_id, (_answered(renderer, row, "completion", prompt_id, 1.0 if row["label"] else -1.0, {}),))


def valued_at_the_end(trajectory: Trajectory, token_id: int) -> Trajectory:
    """A trajectory whose only number is the value of the state behind its last token.

    Values are those of the state before a token of the policy (see `rl4llm.backends.heads`), so one more token is put behind
    the end, and is the only one of the policy. Which it is does not matter, since nothing comes after it.
    """
    read = (TokenSpan.context(span.token_ids) for span in trajectory.spans)
    return replace(trajectory, spans=(*read, TokenSpan((token_id,), "policy", (0.0,), version=0)))


def _answered(
    renderer: Renderer, row: Mapping[str, Any], column: str, prompt_id: str, reward: float, extras: Mapping[str, Any]
) -> Trajectory:
    prompt, answer = ([ChatMessage.from_dict(message) for message in row[name]] for name in ("messages", column))
    return demonstration(renderer, prompt + answer, prompt_id, prompt_size=len(prompt), reward=reward, extras=extras)


def answer_of(where: str, row: Mapping[str, Any], column: str) -> Messages:
    """A text or messages, as messages."""
    value = row.get(column)
    if value is None:
        raise DataError(f"{where}: there is no {column!r} here. The row has: {', '.join(map(str, row))}.")
    messages = [ChatMessage("assistant", value)] if isinstance(value, str) else conversation(where, column, value)
    if not messages or (len(messages) == 1 and not messages[0].content.strip() and not messages[0].tool_calls):
        raise DataError(f"{where}: {column} is empty.")
    return messages


def conversation(where: str, column: str, stored: Any) -> Messages:
    """The messages of a column; raises DataError, with the place, for anything else."""
    if not isinstance(stored, list | tuple) or not all(isinstance(message, Mapping) for message in stored):
        raise DataError(f"{where}: {column} must be a list of {{'role': ..., 'content': ...}}, not {stored!r:.60}.")
    try:
        return [ChatMessage.from_dict(message) for message in stored]
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _shared_prompt(where: str, chosen: Messages, rejected: Messages, prompt: Messages | None) -> Messages:
    """What two whole conversations have in common, up to the answer in which they part."""
    size = next((i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    size = min(len(chosen), len(rejected)) if size is None else size
    while size and chosen[size - 1].role == "assistant":
        size -= 1
    shared = chosen[:size]
    following = {side[size].role for side in (chosen, rejected) if len(side) > size}
    if not shared or following != {"assistant"}:
        raise DataError(
            f"{where}: chosen and rejected start from different prompts: they part at message {size}, which must be the "
            "assistant's in both. Only answers to the same prompt can be compared."
        )
    if prompt is not None and not _belongs(prompt, chosen):
        raise DataError(f"{where}: chosen and rejected are whole conversations, and do not begin with the row's prompt.")
    return shared


def _belongs(prompt: Messages, whole: Messages) -> bool:
    """Whether a conversation begins with a prompt; where there is a system message, the prompt may lack it."""
    start = len(whole) > len(prompt) and whole[0].role == "system" and (not prompt or prompt[0].role != "system")
    return whole[start : len(prompt) + start] == prompt


def _checked_prompt(where: str, row: Mapping[str, Any], prompt: Messages | None) -> Messages:
    if prompt is None:
        raise DataError(
            f"{where}: there is no prompt. Accepted: a column 'prompt' or 'messages' (another: data.prompt_column), or for "
            f"pairs whole conversations in 'chosen' and 'rejected'. The row has: {', '.join(map(str, row))}."
        )
    return prompt


def _check_follows(where: str, column: str, messages: Messages) -> None:
    if not messages or messages[0].role != "assistant":
        role = messages[0].role if messages else "nobody"
        raise DataError(f"{where}: {column} must go on with an answer of the assistant, but its next message is by {role}.")


def _margin(where: str, row: Mapping[str, Any]) -> float:
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise DataError(f"{where}: margin={margin!r:.60} is not accepted: a number, 0 or above.")
    return float(margin)


def _dicts(messages: Messages) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]
