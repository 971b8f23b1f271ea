"""Where a new conversation of an agent comes from: whether it compacts, rewrites or was called by an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    latest = answers[-LATEST:][::-1]
    records = dict.fromkeys(entry.record for entry in answers)
    common = {record: _common(record.messages, messages) for record in records}
    waiting = [entry for entry in latest if entry.waits and not _same_task(messages[: common[entry.record]])]
    called = [(entry, _lines(text)) for entry in waiting for text in _arguments(entry.messages[-1])]
    apart = [entry for entry in latest if common[entry.record] < len(entry.messages)]
    said = [(entry, _lines(entry.messages[-1].content)) for entry in apart]
    last = _last(messages, (line for _, lines in called + said for line in lines))
    for entry, lines in called:
        if _repeats(last, lines):
            return "called", entry.record, entry.turn
    for entry, lines in said:
        if _repeats(last, lines, common[entry.record]):
            return "continues", entry.record, entry.turn
    if waiting:
        return "called", waiting[0].record, waiting[0].turn
    alike = max(common, key=common.__getitem__, default=None)
    return ("rewrites", alike, alike.turns(common[alike])) if alike and common[alike] else None


def _same_task(common: Sequence[ChatMessage]) -> bool:
    return any(message.role == "user" for message in common)


def _common(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> int:
    """Return how many first messages of two conversations are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _lines(written: str) -> list[str]:
    """Return the lines of what the policy wrote that are not too short."""
    lines = (line.strip() for line in after_thinking(written).splitlines())
    return [line for line in lines if len(line) >= LINE]


def _pieces(line: str) -> list[str]:
    """Return a line in pieces of LINE characters; the last may overlap the one before."""
    return [line[at : at + LINE] for at in (*range(0, len(line) - LINE, LINE), len(line) - LINE)]


def _last(messages: Sequence[ChatMessage], lines: Iterable[str]) -> dict[str, int]:
    """Return the number of the last message that has each piece of the lines.

    It takes one pass: a search for each line in a long prompt takes seconds, in which no other agent is answered. What
    tools returned does not count, since it may be what the policy wrote with a tool.
    """
    pieces, last = {piece for line in lines for piece in _pieces(line)}, dict[str, int]()
    for number, text in enumerate(message.content * (message.role != "tool") for message in messages):
        windows = (text[at : at + LINE] for at in range(len(text) - LINE + 1 if pieces else 0))
        last |= dict.fromkeys(pieces.intersection(windows), number)
    return last


def _repeats(last: Mapping[str, int], lines: Sequence[str], begin: int = 0) -> bool:
    """Return whether the messages from `begin` have, word for word, a good part of the lines."""
    whole = [line for line in lines if all(last.get(piece, -1) >= begin for piece in _pieces(line))]
    repeated = sum(map(len, whole))
    return repeated > 0 and repeated >= SHARE * sum(map(len, lines))


def _arguments(answer: ChatMessage) -> Iterator[str]:
    """Yield the texts among the arguments of an answer's calls."""
    for call in answer.tool_calls or ():
        arguments: Any = call.get("function", call).get("arguments")
        values = arguments.values() if isinstance(arguments, Mapping) else ()
        yield from (value for value in values if isinstance(value, str))
