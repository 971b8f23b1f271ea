"""Conversations to imitate, as trajectories whose assistant tokens are the policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage, TokenSpan, Trajectory
from rl4llm.data.render import Renderer


def demonstration(renderer: Renderer, messages: Sequence[ChatMessage], prompt_id: str) -> Trajectory:
    """The tokens that a policy would have sampled, had it said exactly what the assistant says here.

    It is built turn by turn as in a rollout, so a policy trained on it meets the very token sequences it was trained on.
    Raises DataError for a conversation without an assistant message.
    """
    spans: list[TokenSpan] = []
    start = 0
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        between = messages[start:turn]
        prompt = renderer.following(between, ended=True, messages=messages[:turn]) if spans else renderer.first(between)
        spans.append(TokenSpan.context(prompt))
        said = (*renderer.encode(message.content), renderer.stop_token_ids[0])
        spans.append(TokenSpan(said, "policy", (0.0,) * len(said), version=0))
        start = turn + 1
    if not spans:
        raise DataError(f"Row {prompt_id!r} has no assistant message, so there is nothing to imitate.")
    return Trajectory(prompt_id, tuple(spans), tuple(messages), {}, 0.0, "done")


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
