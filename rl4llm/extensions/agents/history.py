"""The token records of one episode, derived from nothing but the messages of its requests.

    place = history.place(tools, messages, renderer)              # where the request continues
    completion = ...                                              # sampled after place.prompt
    entry = history.add(place, completion, answer)

A request whose messages begin with all messages of a record continues that record: only its new messages are tokenized.
A request that begins with fewer starts a new record, a fork: the agent changed, dropped or summarised a part, or asks
again. A fork takes over what it shares with another record, up to an answer of the policy, token for token as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl4llm.core.errors import EnvError, TemplateError
from rl4llm.core.types import ChatMessage, Completion, Origin, TokenSpan, images_of
from rl4llm.data.render import Renderer
from rl4llm.extensions.agents.origins import Source, source_of


@dataclass(slots=True, eq=False)
class Transcript:
    """A conversation as the policy saw it: its messages, its tokens, and where in both the policy's answers end."""

    tools: str
    source: Source | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    # numbers of messages and spans up to and including each answer
    answers: list[tuple[int, int]] = field(default_factory=list)

    def turns(self, messages: int) -> int:
        """Return how many answers are among the first messages."""
        return sum(count <= messages for count, _ in self.answers)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a request continues, after an answer of a record or from scratch, and the tokens that it adds there."""

    tools: str
    messages: tuple[ChatMessage, ...]
    record: Transcript | None
    answer: tuple[int, int]
    earlier: tuple[TokenSpan, ...]
    new: TokenSpan

    @property
    def prompt(self) -> TokenSpan:
        """Return all of it as one span of context."""
        spans = (*self.earlier, self.new)
        return TokenSpan.context([token for span in spans for token in span.token_ids], images_of(spans))


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An answer in a record, and how many messages and spans the record had before."""

    record: Transcript
    messages: tuple[ChatMessage, ...]
    before: tuple[int, int]

    @property
    def turn(self) -> int:
        """Return how many answers the record had with this one."""
        return self.record.turns(len(self.messages))

    @property
    def waits(self) -> bool:
        """Return whether a call of this answer was not answered yet."""
        return bool(self.messages[-1].tool_calls) and len(self.record.messages) == len(self.messages)


class History:
    """All records of an episode, in the order in which they started."""

    def __init__(self) -> None:
        self.records: list[Transcript] = []
        self.entries: list[Entry] = []  # in the order of sampling

    def place(self, tools: str, messages: Sequence[ChatMessage], renderer: Renderer) -> Continuation:
        """Return where these messages continue. `tools` identifies everything else that the start of a prompt depends
        on.

        Raises DataError or TemplateError for a conversation that cannot be rendered.
        """
        messages = tuple(messages)
        records = [record for record in self.records if record.tools == tools]
        found = [(answer, record) for record in records for answer in _shared(record, messages)]
        if found:  # the longest; among equals one that ends there
            answer, record = max(found, key=lambda item: (item[0][0], item[0][0] == len(item[1].messages)))
            new = _behind(record, answer, messages, renderer)
            if new is not None:
                return Continuation(tools, messages, record, answer, tuple(record.spans[: answer[1]]), new)
        first = renderer.context(renderer.first(messages), messages)
        return Continuation(tools, messages, None, (0, 0), (), first)

    def add(self, place: Continuation, completion: Completion, answer: ChatMessage) -> Entry:
        """Record what was sampled at a place; the agent receives it as `answer`."""
        record, context = place.record, place.new
        # a record continues after all of it, if nothing was added meanwhile
        if record is None or place.answer[0] != len(record.messages):
            record, context = Transcript(place.tools, source_of(place.messages, self.entries)), place.prompt
            self.records.append(record)
        before = len(record.messages), len(record.spans)
        record.messages[:] = [*place.messages, answer]
        record.spans += [context, *TokenSpan.policy(completion)]
        record.answers.append((len(record.messages), len(record.spans)))
        entry = Entry(record, tuple(record.messages), before)
        self.entries.append(entry)
        return entry

    def take_back(self, entry: Entry) -> None:
        """Remove an answer that never reached the agent."""
        record = entry.record
        if record.messages != list(entry.messages):
            return  # the answer did reach the agent, which continued from it
        self.entries.remove(entry)
        del record.messages[entry.before[0] :], record.spans[entry.before[1] :], record.answers[-1:]
        if not record.answers:
            self.records.remove(record)

    @property
    def origins(self) -> list[Origin | None]:
        """Return where each record after the first begins."""
        numbers = {id(record): number for number, record in enumerate(self.records)}
        sources = (record.source for record in self.records[1:])
        return [
            Origin(source[0], numbers[id(source[1])], source[2])
            if source and id(source[1]) in numbers  # an answer that was taken back may have been its only one
            else None
            for source in sources
        ]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens in the records that the policy sampled."""
        spans = (span for record in self.records for span in record.spans)
        return sum(len(span.token_ids) for span in spans if span.author == "policy")


def _shared(record: Transcript, messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    """Return the last answer of a record that `messages` can continue from, as a list of at most one."""
    pairs = enumerate(zip(record.messages, messages, strict=False))
    most = next(
        (i for i, (one, other) in pairs if one != other), min(len(record.messages), len(messages) - 1)
    )
    return [answer for answer in record.answers if answer[0] <= min(most, len(messages) - 1)][-1:]


def _behind(
    record: Transcript, answer: tuple[int, int], messages: Sequence[ChatMessage], renderer: Renderer
) -> TokenSpan | None:
    """Return the tokens of the messages after an answer; None if the template can only render the whole conversation."""
    count, spans = answer
    said = record.spans[spans - 1].token_ids
    ended = renderer.ends_turn(said)
    try:
        token_ids = renderer.following(
            messages[count:], ended=ended, by=said[-1] if ended else None, messages=messages[:count]
        )
        return renderer.context(token_ids, messages[count:])
    except (TemplateError, EnvError):
        return None
