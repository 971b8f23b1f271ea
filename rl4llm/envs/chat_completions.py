"""Chat completions in OpenAI's format: the wire of `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rl4llm.core.message import METADATA, THOUGHTS, Part
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.tools.formats import ToolCall
from rl4llm.envs.wire import (
    MODEL,
    Answer,
    Asked,
    Fields,
    Kept,
    Pictures,
    RequestError,
    accepted,
    check_keys,
    dumps,
    flag_of,
    limit_of,
    mapping_of,
    pieces,
    refused,
    stops_of,
)

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
USED = (
    "model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "logprobs", "response_format", "parallel_tool_calls",
)  # fmt: skip
ROW = frozenset(("role", "content", "tool_calls", "tool_call_id", *THOUGHTS, *METADATA))

PART = ("type", "text", "annotations", "logprobs", "cache_control", "citations")
IMAGES = {
    "image_url": ("type", "image_url", "cache_control"),
    "input_image": ("type", "image_url", "detail"),
    "image": ("type", "source", "cache_control"),
}
"""The keys of an image by its type: in OpenAI's chat, in its Responses, in Anthropic's Messages."""
DETAILS = ("auto", "high", "original")  # an image is seen as large as the model sees any


def read_request(
    body: Any, params: SamplingParams, kept: Kept | None = None, unenforced: Collection[str] = ()
) -> Asked:
    """Parse and check a request's JSON; `params` are the run's sampling parameters. Raises RequestError."""
    fields = Fields(body, params, USED, unenforced)
    return Asked(
        messages=_messages(fields.get("messages")),
        tools=read_tools(fields.get("tools", [])),
        schema=fields.schema("response_format", fields.get("response_format")),
        **fields.choice(fields.get("tool_choice", "auto")),
        one_call=not flag_of(fields, "parallel_tool_calls", default=True),
        stop=stops_of(fields, "stop"),
        max_tokens=limit_of(fields, "max_completion_tokens", "max_tokens"),
        stream=flag_of(fields, "stream"),
        stream_usage=flag_of(mapping_of(fields, "stream_options"), "include_usage"),
        logprobs=flag_of(fields, "logprobs"),
        model=str(fields.get("model", MODEL)),
        ignored=tuple(dict.fromkeys(fields.ignored)),
    )


def answer_body(asked: Asked, answer: Answer) -> dict[str, Any]:
    """Return the JSON of the response."""
    choice = {"index": 0, "message": {**answer.message, "refusal": None}, "logprobs": _logprobs(answer)}
    choice["finish_reason"] = answer.finish_reason
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(asked: Asked, answer: Answer) -> Iterator[str]:
    """Yield the same as server-sent events."""
    for chunk in chunks(answer, usage=asked.stream_usage):
        yield f"data: {dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


error_body = RequestError.body


def chunks(answer: Answer, *, usage: bool, shown: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON of the pieces of a stream: the role, the text, the calls, the finish reason, and token counts if asked
    for. With `shown` the role and that number of characters were sent before.
    """

    def piece(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return chunk_of(answer, delta, finish_reason, usage=usage)

    if shown is None:
        yield chunk_of(answer, {"role": "assistant", "content": ""}, logprobs=_logprobs(answer), usage=usage)
    for text in pieces(answer.content, shown or 0):
        yield piece({"content": text})
    for index, call in enumerate(answer.calls):
        begun = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield piece({"tool_calls": [{"index": index, **begun}]})
        for text in pieces(call["function"]["arguments"]):
            yield piece({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    yield piece({}, answer.finish_reason)
    if usage:
        yield {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)}


def chunk_of(
    answer: Answer,
    delta: Mapping[str, Any],
    finish_reason: str | None = None,
    *,
    logprobs: Any = None,
    usage: bool = False,
) -> dict[str, Any]:
    """Return one piece of a stream."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    head = _head(answer, "chat.completion.chunk")
    return {**head, "choices": [choice], **({"usage": None} if usage else {})}


def read_message(row: Any, where: str = "message", picture: Pictures | None = None) -> ChatMessage:
    """Parse one message. Messages that SDKs write in different ways, such as with no content, null or parts, become
    equal.

    Raises RequestError.
    """
    if not isinstance(row, dict) or not isinstance(row.get("role"), str) or row["role"] not in ROLES:
        raise refused(where, f" must be an object with a role, one of {', '.join(ROLES)}: {row!r:.100}.")
    check_keys(row, where, ROW)
    role, calls = ROLES[row["role"]], row.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise refused(where, f".tool_calls must be a list: {calls!r:.100}.")
    parts = _parts(row.get("content"), where, None if role == "assistant" else picture or Pictures())
    content = "".join(part for part in parts if isinstance(part, str))
    if role == "assistant":
        content = content.strip()  # agents trim it too
    thoughts = {name: row[name] for name in THOUGHTS if row.get(name)}
    reasoning = next(iter(thoughts.values()), "")
    if thoughts and (
        role != "assistant" or {str: reasoning} != {type(text): text for text in thoughts.values()}
    ):
        raise refused(where, f": {', '.join(thoughts)} must be one string, in a message of the assistant.")
    call_id = row.get("tool_call_id")
    return ChatMessage(
        role,
        content,
        tuple(_call(call, where) for call in calls) or None,
        None if role != "tool" or call_id is None else str(call_id),
        reasoning.strip(),
        parts=() if all(isinstance(part, str) for part in parts) else parts,
    )


def read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Check a list of tools in the form of OpenAI's chat. Raises RequestError."""
    listed = tools if isinstance(tools, list) else [None]
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in listed]
    named = all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in functions)
    return tuple(accepted("tools", tools, named, 'a list of {"type": "function", "function": {"name": ...}}'))


def functions_of(fields: Fields, kind: str, keys: Mapping[str, str]) -> Any:
    """Return the tools of a request in the form of OpenAI's chat.

    Functions have this `kind`, and `keys` translates what the policy sees of them; other scalars are ignored. Tools of a
    namespace are functions, and the search of a provider is offered to nobody. Raises RequestError for other kinds, and for
    a name that occurs twice, since a call has the name alone.
    """
    listed = fields.get("tools", [])
    if not isinstance(listed, list):
        return listed
    functions: dict[str, Any] = {}
    for tool in _flat(fields, listed):
        row = tool if isinstance(tool, dict) else {}
        if str(row.get("type")).startswith("web_search"):
            fields.ignored.append("tools.web_search")
            continue
        seen = {keys[key]: row[key] for key in keys if row.get(key) is not None}
        if (
            (row.get("type") or kind) != kind
            or not isinstance(seen.get("name"), str)
            or seen["name"] in functions
        ):
            raise RequestError(
                f"tools must have type {kind!r} and different names: {tool!r:.100} is not accepted.",
                param="tools",
            )
        functions[seen["name"]] = {"type": "function", "function": seen}
        fields.ignore("tools", row, {*keys, "type", "cache_control"})
    return list(functions.values())


def _flat(fields: Fields, tools: Iterable[Any]) -> Iterator[Any]:
    """Yield tools, and those of namespaces in their place."""
    for tool in tools:
        if isinstance(tool, dict) and isinstance(tool.get("tools"), list) and tool.get("type") == "namespace":
            fields.ignore("tools", tool, {"type", "name", "tools"})
            yield from tool["tools"]
        else:
            yield tool


def write_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a call of the policy in OpenAI's format."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def text_of(content: Any, where: str) -> str:
    """Return the text of instructions, which may have parts. Raises RequestError."""
    parts = _parts(content, where, None)
    return "".join(part for part in parts if isinstance(part, str))


def _parts(content: Any, where: str, picture: Pictures | None) -> tuple[Part, ...]:
    """Return the texts and pictures of a content; without `picture` it has texts alone. Raises RequestError."""
    if content is None or isinstance(content, str):
        return (content,) if content else ()
    parts: list[Part] = []
    for part in content if isinstance(content, list) else ():
        row = part if isinstance(part, dict) else {}
        if picture is not None and row.get("type") in tuple(IMAGES):
            check_keys(row, where, IMAGES[row["type"]])
            parts.append(picture(_address(row, where), where))
            continue
        check_keys(row, where, PART)
        if isinstance(row.get("text"), str):
            parts.append(row["text"])
    if not isinstance(content, list) or len(parts) < len(content):
        also = " and image" if picture else ""
        raise refused(where, f".content must be a string or a list of text{also} parts: {content!r:.100}.")
    return tuple(parts)


def _address(part: Mapping[str, Any], where: str) -> Any:
    """Return the address of an image, for base64 data a data URI. Raises RequestError for keys that are not read."""
    field = part.get("source", part.get("image_url"))
    source = field if isinstance(field, dict) else {"url": field, "detail": part.get("detail")}
    check_keys(source, where, ("type", "media_type", "data", "url", "detail"))
    if source.get("detail") not in (None, *DETAILS):
        raise refused(where, f".detail={source['detail']!r:.60} is not accepted: {', '.join(DETAILS)}.")
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url")


def check_end(messages: tuple[ChatMessage, ...], name: str) -> tuple[ChatMessage, ...]:
    """Return the messages of a request if they end with one to answer. Raises RequestError."""
    if not messages:
        raise refused(name, " must be a list with at least one message.")
    if messages[-1].role == "assistant":
        raise refused(name, " must end with a message to answer, not with one of the assistant.")
    return messages


def _messages(rows: Any) -> tuple[ChatMessage, ...]:
    rows, picture = rows if isinstance(rows, list) else [], Pictures()
    messages = (read_message(row, f"messages[{number}]", picture) for number, row in enumerate(rows))
    return check_end(tuple(messages), "messages")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(where, f".tool_calls must have functions with names: {call!r:.100}.")
    name, arguments = function["name"], function.get("arguments") or "{}"
    try:  # chat templates expect objects, and agents may format the same one differently
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = value if isinstance(value, dict) else arguments
    except (ValueError, RecursionError):
        pass
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
        "system_fingerprint": None,
    }


def _usage(answer: Answer) -> dict[str, int]:
    new = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": answer.prompt_tokens + new,
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else {"content": answer.logprobs, "refusal": None}
