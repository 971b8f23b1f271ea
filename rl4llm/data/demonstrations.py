"""Conversations to imitate, as trajectories whose assistant tokens are the policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import DataError, EnvError, TemplateError
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.data.render import Renderer


def demonstration(renderer: Renderer, messages: Sequence[ChatMessage], prompt_id: str) -> Trajectory:
    """The tokens that a policy would have sampled, had it said exactly what the assistant says here.

    It is built turn by turn as in a rollout, so a policy trained on it meets the very token sequences it was trained on.
    Raises DataError, with the row's name, for a conversation without an assistant message, and for one that a policy could
    not have had: a thought is missing that the generation prompt opens, or the template cannot show its tool calls.
    """
    try:
        spans = _spans(renderer, messages)
    except (DataError, EnvError, TemplateError) as error:
        raise DataError(f"Row {prompt_id!r} cannot be imitated. {error}") from error
    if not spans:
        raise DataError(f"Row {prompt_id!r} has no assistant message, so there is nothing to imitate.")
    return Trajectory(prompt_id, tuple(spans), tuple(messages), {}, 0.0, "done")


def demonstration_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """The conversation of a row, as a group of one."""
    messages = [ChatMessage.from_dict(message) for message in row["messages"]]
    return Group(prompt_id, (demonstration(renderer, messages, prompt_id),))


def check_demonstrations(renderer: Renderer, rows: Sequence[Mapping[str, Any]], context_length: int) -> None:
    """Make every row's demonstration once; raises DataError, with the row, where one cannot be made or learned from.

    That is one that `demonstration` refuses, or that is longer than `context_length` tokens.
    """
    for number, row in enumerate(rows):
        name = str(row.get("prompt_id", number))
        length = demonstration(renderer, [ChatMessage.from_dict(message) for message in row["messages"]], name).num_tokens
        if length > context_length:
            raise DataError(
                f"Row {name!r} is a conversation of {length} tokens, more than the context of {context_length}. "
                "Next step: shorten it or leave it out of the dataset, or take a model with a longer context."
            )


def _spans(renderer: Renderer, messages: Sequence[ChatMessage]) -> list[TokenSpan]:
    spans: list[TokenSpan] = []
    start = 0
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked, between = messages[:start], messages[start:turn]
        prompt = renderer.following(between, ended=True, messages=asked) if spans else renderer.first(between)
        spans.append(TokenSpan.context(prompt))
        said = (*renderer.encode(renderer.completion_text(messages[: turn + 1])), renderer.stop_token_ids[0])
        spans.append(TokenSpan(said, "policy", (0.0,) * len(said), version=0))
        start = turn + 1
    return spans
