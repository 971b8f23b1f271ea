"""Where a new conversation of an agent comes from: whether it compacts, rewrites or was called by an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rl4llm.core.message import after_thinking
from rl4llm.core.types import ChatMessage, Relation

if TYPE_CHECKING:
    from rl4llm.extensions.agents.history import Entry, Transcript

LATEST = 32  # answers that are compared
LINE = 16  # characters; shorter lines are in many texts
SHARE = 0.3  # of an answer's lines; some agents repeat only a part of an answer, such as its <summary>
Source = tuple[Relation, "Transcript", int]
"""A relation, the other conversation, and how many of its turns it is about."""


def source_of(messages: Sequence[ChatMessage], answers: Sequence[Entry]) -> Source | None:
    """Return where a conversation with these messages comes from, given all answers so far; None if from nowhere.

    It was called if it begins unlike an answer one of whose calls waits, best of all one that wrote its text. It
    continues an answer whose text it repeats after what both have in common. Else it rewrites the conversation that begins
    most like it.
    """
    latest, text = answers[-LATEST:][::-1], _text(messages)
    waiting = [entry for entry in latest if entry.waits and not _same_task(entry.messages, messages)]
    for entry in waiting:
        if any(_repeats(text, written) for written in _arguments(entry.messages[-1])):
            return "called", entry.record, entry.turn
    for entry in latest:
        begin = _common(entry.messages, messages)
        if begin < len(entry.messages) and _repeats(_text(messages[begin:]), entry.messages[-1].content):
            return "continues", entry.record, entry.turn
    if waiting:
        return "called", waiting[0].record, waiting[0].turn
    alike = max(answers, key=lambda entry: _common(entry.messages, messages), default=None)
    if alike is None or not (common := _common(alike.messages, messages)):
        return None
    return "rewrites", alike.record, alike.record.turns(common)


def _same_task(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    return any(message.role == "user" for message in one[: _common(one, other)])


def _common(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> int:
    """Return how many first messages of two conversations are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text(messages: Sequence[ChatMessage]) -> str:
    """Return what messages say, except what tools returned, which may be what the policy wrote with a tool."""
    return "\n".join(message.content for message in messages if message.role != "tool")


def _repeats(text: str, written: str) -> bool:
    """Return whether a text has, word for word, a good part of what the policy wrote."""
    lines = [line.strip() for line in after_thinking(written).splitlines()]
    lines = [line for line in lines if len(line) >= LINE]
    repeated = sum(len(line) for line in lines if line in text)
    return repeated > 0 and repeated >= SHARE * sum(map(len, lines))


def _arguments(answer: ChatMessage) -> Iterator[str]:
    """Yield the texts among the arguments of an answer's calls."""
    for call in answer.tool_calls or ():
        arguments: Any = call.get("function", call).get("arguments")
        values = arguments.values() if isinstance(arguments, Mapping) else ()
        yield from (value for value in values if isinstance(value, str))
