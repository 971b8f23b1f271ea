"""Conversations of a dataset as trajectories: token for token what a policy would have been given and would have said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rl4llm.core.errors import DataError, EnvError, TemplateError
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.data.render import Renderer

Learned = Literal["assistant", "context", "all"]
"""Whose tokens are the policy's: the assistant's; those of the environment behind the first answer; or both."""

Read = Callable[[Mapping[str, Any], str], Group]
"""(row, its name) -> what is learned from it."""


def demonstration(
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    prompt_id: str,
    *,
    learned: Learned = "assistant",
    prompt_size: int = 0,
    reward: float = 0.0,
    extras: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The tokens that a policy would have sampled, had it said exactly what the assistant says here.

    It is built turn by turn as in a rollout, so a policy trained on it meets the very token sequences it was trained on.
    The first `prompt_size` messages are a prompt even where the assistant speaks in them.
    Raises DataError, with the row's name, for a conversation with nothing to learn, and for one that a policy could not have
    had: a thought is missing that the generation prompt opens, or the template cannot show its tool calls.
    """
    try:
        spans = _spans(renderer, messages, prompt_size, whole=learned != "assistant")
    except (DataError, EnvError, TemplateError) as error:
        raise DataError(f"{_row(prompt_id, messages)} cannot be imitated. {error}") from error
    if not spans:
        raise DataError(f"{_row(prompt_id, messages)} has no assistant message, so there is nothing to imitate.")
    if learned == "context" and len(spans) < 3:
        where = _row(prompt_id, messages)
        raise DataError(f"{where} has no message behind the first answer, so there is no next state to predict.")
    written = spans[:1] + [_by_author(span, learned) for span in spans[1:]]
    return Trajectory(prompt_id, tuple(written), tuple(messages), {}, reward, "done", extras or {})


def demonstration_group(
    renderer: Renderer, row: Mapping[str, Any], prompt_id: str, *, learned: Learned = "assistant"
) -> Group:
    """The conversation of a row, as a group of one."""
    messages = [ChatMessage.from_dict(message) for message in row["messages"]]
    return Group(prompt_id, (demonstration(renderer, messages, prompt_id, learned=learned),))


def check_rows(read: Read, rows: Sequence[Mapping[str, Any]], context_length: int) -> None:
    """Read every row once; raises DataError, with the row, where that fails or has more than `context_length` tokens."""
    for number, row in enumerate(rows):
        name = str(row.get("prompt_id", number))
        length = max(trajectory.num_tokens for trajectory in read(row, name).trajectories)
        check_length(name, row, length, context_length)


def check_length(name: str, row: Mapping[str, Any], length: int, context_length: int) -> None:
    """Raises DataError for a row of too many tokens."""
    if length > context_length:
        where = _row(name, [ChatMessage.from_dict(message) for message in row["messages"]])
        raise DataError(
            f"{where} is a conversation of {length} tokens, more than the context of {context_length}. "
            "Next step: shorten it or leave it out of the dataset, or take a model with a longer context."
        )


def _row(name: str, messages: Sequence[ChatMessage]) -> str:
    """The row by its name and how it begins, since its name may be one that no file has."""
    begins = next((message.content for message in messages if message.role != "system"), "")
    return f"Row {name!r} ({begins[:60]!r})"


def _spans(renderer: Renderer, messages: Sequence[ChatMessage], prompt_size: int, *, whole: bool) -> list[TokenSpan]:
    """By turns context and policy; what follows on the last answer only when the `whole` conversation is asked for."""
    spans: list[TokenSpan] = []
    start = 0
    for turn, message in enumerate(messages):
        if message.role != "assistant" or turn < prompt_size:
            continue
        asked, between = messages[:start], messages[start:turn]
        prompt = renderer.following(between, ended=True, messages=asked) if spans else renderer.first(between)
        spans.append(TokenSpan.context(prompt))
        said = (*renderer.encode(renderer.completion_text(messages[: turn + 1])), renderer.stop_token_ids[0])
        spans.append(_policy(said))
        start = turn + 1
    if whole and spans and start < len(messages):
        spans.append(TokenSpan.context(renderer.following(messages[start:], ended=True, messages=messages[:start])))
    return spans


def _by_author(span: TokenSpan, learned: Learned) -> TokenSpan:
    """A span behind the prompt as the policy's if its tokens are learned, and as context if not."""
    if learned == "assistant":
        return span
    as_policy = learned == "all" or span.author == "context"
    return _policy(span.token_ids) if as_policy else TokenSpan.context(span.token_ids)


def _policy(token_ids: tuple[int, ...]) -> TokenSpan:
    return TokenSpan(token_ids, "policy", (0.0,) * len(token_ids), version=0)
