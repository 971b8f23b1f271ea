"""Messages of `environments.proto`, and conversions of samples to and from them.

The compiled protocol is read at run time, so that any version of protobuf works. To compile it after a change:

    python -m grpc_tools.protoc -Irl4llm/extensions/remote --descriptor_set_out=rl4llm/extensions/remote/environments.binpb \
        environments.proto
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, message_factory

from rl4llm.core.errors import DataError
from rl4llm.core.images import Image, ImagePlace, Picture
from rl4llm.core.registry import load
from rl4llm.core.sample import EpisodeState, Line, SampleState, Special
from rl4llm.core.types import ChatMessage, TokenSpan
from rl4llm.rewards.ask import Broken

PROTOCOL = 5
MAX_MESSAGE_BYTES = 64 * 1024**2
COMPILED = Path(__file__).with_name("environments.binpb")
PACKAGE = "rl4llm.environments.v1"


FILES = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
MESSAGES: dict[str, Any] = {
    name.removeprefix(f"{PACKAGE}."): made for name, made in message_factory.GetMessages(FILES).items()
}
SERVICE = MESSAGES["Said"].DESCRIPTOR.file.services_by_name["Environments"]
Begin, Said, Answer, Score = (MESSAGES[name] for name in ("Begin", "Said", "Answer", "Score"))
HelloRequest, HelloReply, Offer = (MESSAGES[name] for name in ("HelloRequest", "HelloReply", "Offer"))
PromptsRequest, Row = MESSAGES["PromptsRequest"], MESSAGES["Row"]
OpenRequest, Opened, Reward = (MESSAGES[name] for name in ("OpenRequest", "Opened", "Reward"))


@dataclass(slots=True)
class Sent:
    """How much of an episode the host has received, by role."""

    begun: bool = False
    lines: int = 0
    messages: defaultdict[str, list[ChatMessage]] = field(default_factory=lambda: defaultdict(list))
    spans: Counter[str] = field(default_factory=Counter)


def update_message(sample: SampleState, sent: Sent, *, finished: bool = False) -> Any:
    """Return the message with what is new in an episode. Raises DataError for a row that is not JSON-compatible."""
    message, episode = Said(finished=finished), sample.episode
    if not sent.begun:
        message.begin.CopyFrom(
            Begin(
                session=sample.session,
                prompt_id=sample.prompt_id,
                index=sample.index,
                prompt_size=sample.init_msg_size,
                ground_truth=to_json(sample.ground_truth, f"prompt {sample.prompt_id!r}: ground_truth"),
                columns=to_json(dict(sample.columns), f"prompt {sample.prompt_id!r}: its columns"),
                is_baseline=sample.special.is_baseline,
                role=sample.role,
                seed=episode.seed if episode else 0,
                task=map(_message, episode.task if episode else ()),
            )
        )
    if episode:
        message.lines.extend(MESSAGES["Line"](**line._asdict()) for line in episode.said[sent.lines :])
        sent.lines = len(episode.said)
    for seat in sample.seats:
        into, before = message.seats[seat.role], sent.messages[seat.role]
        common = next(
            (n for n, pair in enumerate(zip(before, seat.messages, strict=False)) if pair[0] != pair[1]),
            len(before),
        )
        into.replaced, into.step = len(before) - common, seat.current_step
        into.finished = (seat.stop_reason or "done") if finished else ""
        into.messages.extend(_message(item) for item in seat.messages[common:])
        spans = [*chain(*seat.special.forks, seat.spans)]  # those of records that ended, too
        into.spans.extend(_span(item) for item in spans[sent.spans[seat.role] :])
        sent.messages[seat.role], sent.spans[seat.role] = list(seat.messages), len(spans)
    sent.begun = True
    return message


def new_sample(message: Any, roles: Sequence[str]) -> SampleState:
    """Return the sample that a first message begins, still without its messages."""
    begin = message.begin
    sample = SampleState(
        begin.prompt_id,
        begin.index,
        [],
        json.loads(begin.ground_truth),
        json.loads(begin.columns),
        session=begin.session,
        special=Special(is_baseline=begin.is_baseline),
    )
    sample.init_msg_size = begin.prompt_size
    if not begin.role:
        return sample
    episode = EpisodeState(_chat_messages(begin.task), begin.seed)
    for role in roles:
        seat = episode.seat(role, [], like=sample)
        seat.init_msg_size = len(message.seats[role].messages)
    episode.seats[begin.role].session = begin.session
    return episode.seats[begin.role]


def apply_update(message: Any, sample: SampleState) -> None:
    """Update the host's samples of an episode from a message of the trainer."""
    if sample.episode:
        sample.episode.said.extend(Line(line.role, line.text) for line in message.lines)
    for seat in sample.seats:
        new = message.seats[seat.role]
        del seat.messages[len(seat.messages) - new.replaced :]
        seat.messages.extend(_chat_messages(new.messages))
        seat.spans.extend(_token_span(item) for item in new.spans)
        seat.current_step = new.step
        if new.finished:
            seat.finish(new.finished)


def answer(
    sample: SampleState,
    replies: Sequence[ChatMessage] = (),
    scores: Mapping[str, Mapping[str, Sequence[float] | Broken]] | None = None,
    role: str = "",
) -> Any:
    """Return the message with the result of the host's turn. Raises ValueError for replies that cannot be sent.

    `role` is the next one to speak, which reads the replies. `scores` has the scores of each reward by role.
    """
    message = Answer(
        messages=map(_message, replies),
        role=role,
        failure=_plain(sample.failure or ""),
        failure_class=sample.failure_class,
    )
    for seat in sample.seats:
        into = message.results[seat.role]
        # other extras stay in the environment's process
        into.extras = json.dumps({name: item for name, item in seat.extras.items() if _is_plain(item)})
        into.turn_rewards.update(seat.turn_rewards)
        into.stop_reason = seat.stop_reason or ""
        into.scores.extend(score(*pair) for pair in (scores or {}).get(seat.role, {}).items())
    return message


def apply_answer(message: Any, sample: SampleState) -> list[ChatMessage]:
    """Update the trainer's samples of an episode from a message of the host; return the replies, like `respond`."""
    for seat in sample.seats:
        of_seat = message.results[seat.role]
        seat.extras.update(json.loads(of_seat.extras or "{}"))
        seat.turn_rewards.update(of_seat.turn_rewards)
        if of_seat.stop_reason and not message.failure:
            seat.finish(of_seat.stop_reason)
    if message.failure:
        sample.fail(message.failure, message.failure_class)
    return _chat_messages(message.messages)


def score(reward: str, value: Sequence[float] | Broken) -> Any:
    """Return the message with the score of one reward, as returned by `rl4llm.rewards.ask`."""
    if isinstance(value, Broken):
        return Score(reward=reward, broken_kind=value.kind, broken_reason=_plain(value.reason))
    return Score(reward=reward, values=value)


def scores_of(message: Any, seat: SampleState) -> dict[str, list[float] | Broken]:
    """Return the scores of one role in an answer, by reward."""
    return {
        item.reward: Broken(item.broken_kind, item.broken_reason) if item.broken_kind else list(item.values)
        for item in message.results[seat.role].scores
    }


def row_json(row: Mapping[str, Any], where: str) -> str:
    """Return a row as JSON, with the pictures of its messages as data URIs. Raises DataError if that is not possible."""
    messages = row.get("messages")
    if isinstance(messages, list) and any(map(_has_pictures, messages)):
        row = {**row, "messages": [ChatMessage.from_dict(message).to_json() for message in messages]}
    return to_json(dict(row), where)


def row_of(text: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(text)
    messages = row.get("messages")
    if isinstance(messages, list) and any(isinstance(item, dict) and "parts" in item for item in messages):
        picture = _row_images()
        row["messages"] = [ChatMessage.from_dict(item, picture).to_dict() for item in messages]
    return row


def _has_pictures(message: Any) -> bool:
    """Return whether a message, read or not, holds pictures; JSON has no form of their class."""
    fields = message if isinstance(message, Mapping) else {}
    lists = [fields[key] for key in ("parts", "content") if isinstance(fields.get(key), list)]
    return any(isinstance(part, Picture) for parts in lists for part in parts)


def to_json(value: Any, where: str) -> str:
    """Return a value as JSON that decodes to the same value. Raises DataError if that is not possible."""
    try:
        text = json.dumps(value)
        if json.loads(text) == value:
            return text
        problem = "it changes as JSON, like tuples and keys that are not strings"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise DataError(
        f"{where} cannot be sent to a host of environments: {problem}. Accepted: numbers, strings, lists, mappings."
    )


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _plain(text: str) -> str:
    """Replace lone surrogates, which protobuf refuses."""
    return text.encode(errors="replace").decode()


def _message(item: ChatMessage) -> Any:
    return MESSAGES["Message"](
        role=item.role,
        content=item.content,
        tool_calls=[json.dumps(dict(call)) for call in item.tool_calls or ()],
        tool_call_id=item.tool_call_id,
        failed=item.failed,
        reasoning=item.reasoning,
        parts=[{"text": part} if isinstance(part, str) else {"picture": part.data} for part in item.parts],
        seconds=item.seconds,
    )


def _chat_messages(messages: Sequence[Any]) -> list[ChatMessage]:
    """Return messages; raises DataError for pictures that exceed the limits of a row, whose headers are read."""
    picture = _row_images() if any(message.parts for message in messages) else None
    return [_chat_message(message, picture) for message in messages]


def _chat_message(message: Any, picture: Any) -> ChatMessage:
    calls = tuple(json.loads(call) for call in message.tool_calls) or None
    call_id = message.tool_call_id if message.HasField("tool_call_id") else None
    parts = (
        part.text if part.WhichOneof("kind") == "text" else picture(part.picture) for part in message.parts
    )
    return ChatMessage(
        message.role,
        message.content,
        calls,
        call_id,
        message.reasoning,
        failed=message.failed,
        parts=tuple(parts),
        seconds=message.seconds if message.HasField("seconds") else None,
    )


def _row_images() -> Any:
    """Return what reads the pictures of one message of the protocol, within the limits of a row."""
    return load("rl4llm.data.images:RowImages")({}, None)


def _span(item: TokenSpan) -> Any:
    images = [
        dataclasses.asdict(place.image) | {"offset": place.offset, "length": place.length}
        for place in item.images
    ]
    return MESSAGES["Span"](
        token_ids=item.token_ids,
        policy=item.author == "policy",
        logprobs=item.logprobs,
        version=item.version,
        images=images,
    )


def _token_span(message: Any) -> TokenSpan:
    if not message.policy:
        places = (
            ImagePlace(Image(item.digest, item.height, item.width), item.offset, item.length)
            for item in message.images
        )
        return TokenSpan.context(tuple(message.token_ids), tuple(places))
    return TokenSpan(tuple(message.token_ids), "policy", tuple(message.logprobs), message.version)
