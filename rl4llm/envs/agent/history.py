"""The token records of one episode, told from nothing but the messages of its requests.

    place = history.place(tools, messages, renderer)              # where the request goes on
    completion = ...                                              # sampled behind place.prompt_ids
    entry = history.add(place, completion, answer)

A request whose messages begin with all that a record holds goes on with that record: only its new messages are tokenized.
One that begins with less, because the agent changed, dropped or summarised a part or asks again, begins a record of its own,
a fork. What a fork shares with another record, up to an answer of the policy, it takes over token for token, as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl4llm.core.errors import EnvError, TemplateError
from rl4llm.core.types import ChatMessage, Completion, TokenSpan
from rl4llm.data.render import Renderer


@dataclass(slots=True, eq=False)
class Record:
    """A conversation as the policy saw it: its messages, its tokens, and where in both the policy's own answers end."""

    tools: str
    messages: list[ChatMessage] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)  # messages and spans up to and including each


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on: behind an answer of a record, or nowhere; and the tokens that it adds there."""

    tools: str
    messages: tuple[ChatMessage, ...]
    record: Record | None
    answer: tuple[int, int]
    earlier_ids: tuple[int, ...]
    new_ids: tuple[int, ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.earlier_ids + self.new_ids

    @property
    def extends(self) -> bool:
        """Whether all of the record stands before it, and nothing was added meanwhile."""
        return self.record is not None and self.answer[0] == len(self.record.messages)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An answer in a record, and how much the record held before."""

    record: Record
    messages: tuple[ChatMessage, ...]
    before: tuple[int, int]


class History:
    """All records of an episode, in the order in which they began."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.entries: list[Entry] = []  # as they were sampled

    def place(self, tools: str, messages: Sequence[ChatMessage], renderer: Renderer) -> Place:
        """Where these messages go on. `tools` stands for what else the beginning of a prompt depends on.

        Raises DataError or TemplateError for a conversation that cannot be rendered.
        """
        messages = tuple(messages)
        records = [record for record in self.records if record.tools == tools]
        found = [(answer, record) for record in records for answer in _shared(record, messages)]
        if found:  # the longest; among equals one that ends there
            answer, record = max(found, key=lambda item: (item[0][0], item[0][0] == len(item[1].messages)))
            new_ids = _behind(record, answer, messages, renderer)
            if new_ids is not None:
                earlier_ids = tuple(token for span in record.spans[: answer[1]] for token in span.token_ids)
                return Place(tools, messages, record, answer, earlier_ids, tuple(new_ids))
        return Place(tools, messages, None, (0, 0), (), tuple(renderer.first(messages)))

    def add(self, place: Place, completion: Completion, answer: ChatMessage) -> Entry:
        """Write down what was sampled at a place, as which the agent is given `answer`."""
        record, context_ids = place.record, place.new_ids
        if record is None or not place.extends:
            record, context_ids = Record(place.tools), place.prompt_ids
            self.records.append(record)
        before = len(record.messages), len(record.spans)
        record.messages[:] = [*place.messages, answer]
        record.spans += [TokenSpan.context(context_ids), *TokenSpan.policy(completion)]
        record.answers.append((len(record.messages), len(record.spans)))
        entry = Entry(record, tuple(record.messages), before)
        self.entries.append(entry)
        return entry

    def take_back(self, entry: Entry) -> None:
        """Strike out an answer that never reached the agent."""
        record = entry.record
        if record.messages != list(entry.messages):
            return  # it did reach it: it goes on from there
        self.entries.remove(entry)
        del record.messages[entry.before[0] :], record.spans[entry.before[1] :], record.answers[-1:]
        if not record.answers:
            self.records.remove(record)

    @property
    def sampled_tokens(self) -> int:
        """Tokens in the records that the policy sampled."""
        spans = (span for record in self.records for span in record.spans)
        return sum(len(span.token_ids) for span in spans if span.author == "policy")


def _shared(record: Record, messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    """The last answer of a record behind which `messages` could go on, if there is one."""
    pairs = enumerate(zip(record.messages, messages, strict=False))
    most = next((i for i, (one, other) in pairs if one != other), min(len(record.messages), len(messages) - 1))
    return [answer for answer in record.answers if answer[0] <= min(most, len(messages) - 1)][-1:]


def _behind(
    record: Record, answer: tuple[int, int], messages: Sequence[ChatMessage], renderer: Renderer
) -> list[int] | None:
    """The tokens of the messages behind an answer; None where the template can only render them as part of the whole."""
    count, spans = answer
    ended = renderer.ends_turn(record.spans[spans - 1].token_ids)
    try:
        return renderer.following(messages[count:], ended=ended, messages=messages[:count])
    except (TemplateError, EnvError):
        return None
