"""Messages of `environments.proto`, and conversions of samples to and from them.

The compiled protocol is read at run time, so that any version of protobuf works. To compile it after a change:

    python -m grpc_tools.protoc -Irl4llm/extensions/remote --descriptor_set_out=rl4llm/extensions/remote/environments.binpb \
        environments.proto
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rl4llm.core.errors import DataError, EnvError
from rl4llm.core.sample import SampleState, Special
from rl4llm.core.types import ChatMessage, TokenSpan
from rl4llm.rewards.ask import Broken

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 * 1024**2
COMPILED = Path(__file__).with_name("environments.binpb")
PACKAGE = "rl4llm.environments.v1"


def _read() -> tuple[dict[str, Any], Any]:
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    classes = message_factory.GetMessageClassesForFiles([file.name for file in files], pool)
    return {name.removeprefix(f"{PACKAGE}."): made for name, made in classes.items()}, pool.FindServiceByName(
        f"{PACKAGE}.Environments"
    )


MESSAGES, SERVICE = _read()
Begin, Said, Answer, Score = (MESSAGES[name] for name in ("Begin", "Said", "Answer", "Score"))
HelloRequest, HelloReply, Offer = (MESSAGES[name] for name in ("HelloRequest", "HelloReply", "Offer"))
PromptsRequest, Row = MESSAGES["PromptsRequest"], MESSAGES["Row"]
OpenRequest, Wanted, FilePart, Opened = (
    MESSAGES[name] for name in ("OpenRequest", "Wanted", "FilePart", "Opened")
)
Reward = MESSAGES["Reward"]


@dataclass(slots=True)
class Sent:
    """How much of a sample the host has received."""

    begun: bool = False
    messages: int = 0
    spans: int = 0


def said(sample: SampleState, sent: Sent, finished: str = "") -> Any:
    """Return the message with what is new in a sample. Raises DataError for a row that is not JSON-compatible."""
    message = Said(step=sample.current_step, finished=finished)
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
            )
        )
    message.messages.extend(_message(item) for item in sample.messages[sent.messages :])
    message.spans.extend(_span(item) for item in sample.spans[sent.spans :])
    sent.begun, sent.messages, sent.spans = True, len(sample.messages), len(sample.spans)
    return message


def begun(message: Any) -> SampleState:
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
    return sample


def take_said(message: Any, sample: SampleState) -> None:
    """Update the host's sample from a message of the trainer."""
    sample.messages.extend(_chat_message(item) for item in message.messages)
    sample.spans.extend(_token_span(item) for item in message.spans)
    sample.current_step = message.step


def answer(sample: SampleState, replies: Sequence[ChatMessage] = (), scores: Sequence[Any] = ()) -> Any:
    """Return the message with the result of the host's turn. Raises EnvError for replies that cannot be sent."""
    try:
        message = Answer(
            messages=[_message(item) for item in replies],
            extras=json.dumps(_sendable(sample.extras)),
            turn_rewards=sample.turn_rewards,
            stop_reason=sample.stop_reason or "",
            failure=_plain(sample.failure or ""),
            failure_class=sample.failure_class,
            scores=scores,
        )
    except (ValueError, TypeError) as error:
        raise EnvError(f"its answer cannot be sent: {error}") from error
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        most = MAX_MESSAGE_BYTES // 1024**2
        raise EnvError(f"its answer has {size // 1024**2} MB, but a message may have at most {most} MB")
    return message


def take_answer(message: Any, sample: SampleState) -> list[ChatMessage]:
    """Update the trainer's sample from a message of the host; return the replies, like `respond`."""
    sample.extras.update(json.loads(message.extras or "{}"))
    sample.turn_rewards.update(message.turn_rewards)
    if message.failure:
        sample.fail(message.failure, message.failure_class)
    elif message.stop_reason:
        sample.finish(message.stop_reason)
    return [_chat_message(item) for item in message.messages]


def score(reward: str, value: Sequence[float] | Broken) -> Any:
    """Return the message with the score of one reward, as returned by `rl4llm.rewards.ask`."""
    if isinstance(value, Broken):
        return Score(reward=reward, broken_kind=value.kind, broken_reason=_plain(value.reason))
    return Score(reward=reward, values=value)


def take_score(message: Any) -> list[float] | Broken:
    """Return the score in a message; the inverse of `score`."""
    if message.broken_kind:
        return Broken(message.broken_kind, message.broken_reason)
    return list(message.values)


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


def from_json(text: str, kind: type, where: str) -> Any:
    """Return the value of this type in a JSON text. Raises DataError for other texts."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, kind):
        raise DataError(f"{where} is {text!r:.100}, not a JSON {kind.__name__}.")
    return value


def _sendable(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extras that are JSON-compatible; other objects stay in the environment's process."""
    return {name: value for name, value in extras.items() if _is_plain(value)}


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
    message = MESSAGES["Message"](role=item.role, content=item.content)
    message.tool_calls.extend(json.dumps(dict(call)) for call in item.tool_calls or ())
    if item.tool_call_id is not None:
        message.tool_call_id = item.tool_call_id
    return message


def _chat_message(message: Any) -> ChatMessage:
    calls = tuple(json.loads(call) for call in message.tool_calls) or None
    call_id = message.tool_call_id if message.HasField("tool_call_id") else None
    return ChatMessage(message.role, message.content, calls, call_id)


def _span(item: TokenSpan) -> Any:
    message = MESSAGES["Span"](token_ids=item.token_ids, policy=item.author == "policy")
    if message.policy:
        message.logprobs.extend(item.logprobs)
        message.version = item.version
    return message


def _token_span(message: Any) -> TokenSpan:
    if not message.policy:
        return TokenSpan.context(tuple(message.token_ids))
    return TokenSpan(tuple(message.token_ids), "policy", tuple(message.logprobs), message.version)
