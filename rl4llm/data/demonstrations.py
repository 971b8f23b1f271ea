"""Conversations of a dataset as trajectories, with the exact tokens that a policy would have read and sampled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from rl4llm.core.errors import DataError, EnvError, TemplateError
from rl4llm.core.message import after_thinking
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.data.columns import TEMPLATE_ARGS, TOOLS
from rl4llm.data.render import Renderer

Learned = Literal["assistant", "context", "all"]
"""Whose tokens are learned: the assistant's; the environment's after the first answer ('context'); or both ('all')."""

Read = Callable[[Mapping[str, Any], str], Group]
"""(row, its name) -> the group that is learned from."""


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
    """Return the trajectory of a policy that had sampled exactly the assistant's messages.

    It is built turn by turn as in a rollout, so that training and sampling see the same token sequences.
    The first `prompt_size` messages are a prompt even if the assistant speaks in them.
    A message that is marked as not learned is context, see `ChatMessage.learned`.
    Raises DataError, with the row's name, for a conversation without an answer, and for one that no policy could have had:
    it lacks a thought that the generation prompt opens, or the template cannot show its tool calls.
    """
    begins = next((message.content for message in messages if message.role != "system"), "")
    row = f"Row {prompt_id!r} ({begins[:60]!r})"  # with its first words, since its name may not occur in any file
    try:
        segments = _segments(renderer, messages, prompt_size, whole=learned != "assistant")
    except (DataError, EnvError, TemplateError) as error:
        raise DataError(f"{row} cannot be imitated. {error}") from error
    if not segments:
        raise DataError(f"{row} has no assistant message, so there is nothing to imitate.")
    spans = [renderer.context(segments[0].token_ids, segments[0].messages)]
    # after the prompt, tokens that are learned are the policy's, all others context
    for segment in segments[1:]:
        spans.append(
            TokenSpan(segment.token_ids, "policy", (0.0,) * len(segment.token_ids), version=0)
            if _learns(segment, learned)
            else renderer.context(segment.token_ids, segment.messages)
        )
    count = renderer.special_tokens(messages)
    noted = {**(extras or {}), **({"metrics": {"special_tokens": count}} if count else {})}
    return Trajectory(prompt_id, tuple(spans), tuple(messages), {}, reward, "done", noted)


def demonstration_group(
    renderer: Renderer, row: Mapping[str, Any], prompt_id: str, *, learned: Learned = "assistant"
) -> Group:
    """Return the conversation of a row as a group of one."""
    messages = [ChatMessage.from_dict(message) for message in row["messages"]]
    return Group(prompt_id, (demonstration(renderer.of_row(row), messages, prompt_id, learned=learned),))


def pair_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """Return the chosen answer with reward 1 and the rejected one with reward -1, both with the pair's margin."""
    extras = {"margin": row.get("margin", 0.0)}
    sides = (("chosen", 1.0), ("rejected", -1.0))
    pair = (_answered(renderer, row, column, prompt_id, reward, extras) for column, reward in sides)
    return Group(prompt_id, tuple(pair))


def comparison_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """Return a pair with one value at the end of each conversation."""
    pair = pair_group(renderer, row, prompt_id)
    return replace(pair, trajectories=tuple(valued_at_the_end(each, renderer) for each in pair.trajectories))


def label_group(renderer: Renderer, row: Mapping[str, Any], prompt_id: str) -> Group:
    """Return an answer with reward 1 if it is good and -1 if it is bad, as a group of one."""
    reward = 1.0 if row["label"] else -1.0
    return Group(prompt_id, (_answered(renderer, row, "completion", prompt_id, reward),))


def valued_at_the_end(trajectory: Trajectory, renderer: Renderer) -> Trajectory:
    """Return the trajectory with only one policy token, which stands for the value of the state after its last token.

    The last token is that of the whole rendered conversation, such as a line break after the end of turn, since classifiers
    of transformers give the score there. A value describes the state before a policy token (see `rl4llm.backends.heads`),
    so one is appended. Any token works, since none follows it.
    """
    context = [TokenSpan.context(span.token_ids, span.images) for span in trajectory.spans]
    if renderer.after_turn:
        context.append(TokenSpan.context(renderer.after_turn))
    stop = renderer.stop_token_ids[0]
    return replace(trajectory, spans=(*context, TokenSpan((stop,), "policy", (0.0,), version=0)))


def _answered(
    renderer: Renderer,
    row: Mapping[str, Any],
    column: str,
    prompt_id: str,
    reward: float,
    extras: Mapping[str, Any] | None = None,
) -> Trajectory:
    messages = [ChatMessage.from_dict(message) for message in (*row["messages"], *row[column])]
    size = len(row["messages"])
    return demonstration(
        renderer.of_row(row), messages, prompt_id, prompt_size=size, reward=reward, extras=extras
    )


class _Segment(NamedTuple):
    """The tokens of some messages: one of the assistant's, or those between two of them."""

    token_ids: tuple[int, ...]
    messages: Sequence[ChatMessage]


def _learns(segment: _Segment, learned: Learned) -> bool:
    """Return whether the tokens of a segment are learned; its messages have the same weight where it counts."""
    of_assistant = segment.messages[-1].role == "assistant"
    whose = learned == "all" or of_assistant is (learned == "assistant")
    return whose and segment.messages[-1].learned is not False


def _segments(
    renderer: Renderer, messages: Sequence[ChatMessage], prompt_size: int, *, whole: bool
) -> list[_Segment]:
    """Return what others and the assistant said in turn; with `whole`, also what follows the last answer."""
    segments: list[_Segment] = []
    turns = [turn for turn, item in enumerate(messages) if item.role == "assistant" and turn >= prompt_size]
    start, by = 0, None
    for turn, after in zip(turns, [*turns[1:], len(messages)], strict=False):
        history, between = messages[:start], messages[start:turn]
        prompt = (
            renderer.following(between, ended=True, by=by, messages=history)
            if segments
            else renderer.first(between)
        )
        new = messages[turn + 1 : after] if whole or after < len(messages) else ()
        completion = tuple(renderer.completion(messages[: turn + 1], new))
        segments += [_Segment(tuple(prompt), between), _Segment(completion, messages[turn : turn + 1])]
        start, by = turn + 1, completion[-1]
    if whole and segments and start < len(messages):
        rest = renderer.following(messages[start:], ended=True, by=by, messages=messages[:start])
        segments.append(_Segment(tuple(rest), messages[start:]))
    return segments


def by_form(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the rows whose conversations, in these columns of messages, have the same form.

    A template that renders one row of a form renders nearly all of them: it asks for roles, calls, thoughts and tools.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        kinds = [_kind(message) for column in columns for message in row[column]]
        form = frozenset(pairwise((None, *kinds, None))), bool(row.get(TOOLS)), str(row.get(TEMPLATE_ARGS))
        numbers.setdefault(form, []).append(number)
    return list(numbers.values())


def _kind(message: Mapping[str, Any]) -> tuple[Any, ...]:
    content = message["content"].strip()
    opening = content[:8] if content.startswith("<") else ""  # such as <think>
    flags = (bool(message.get(key)) for key in ("parts", "tool_calls", "reasoning_content"))
    return (message["role"], bool(content), opening, after_thinking(content) != content, *flags)


def as_row(episode: Trajectory) -> dict[str, Any]:
    """Return an episode as a row of a dataset; `group` is the id of its prompt."""
    names = [episode.prompt_id, *([episode.role] if episode.role else []), str(episode.extras["sample"])]
    return {
        "prompt_id": "/".join(names),
        "group": episode.prompt_id,
        **({"role": episode.role} if episode.role else {}),
        "messages": [message.to_json() for message in episode.messages],
        "ground_truth": episode.extras["ground_truth"],
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "stop_reason": episode.stop_reason,
    }
