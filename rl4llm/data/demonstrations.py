"""Conversations to imitate, as trajectories whose assistant tokens are the policy's."""

from __future__ import annotations

from collections.abc import Sequence

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
