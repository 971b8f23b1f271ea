"""OpenAI's Responses: the wire of `/v1/responses`.

An answer's text and calls are items of its output. A later request repeats them, or names the answer in
`previous_response_id`, which the session keeps unless `store` is false.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.chat_completions import check_end, functions_of, read_message, read_tools, text_of
from rl4llm.envs.wire import (
    MODEL,
    PLAIN,
    Answer,
    Asked,
    Fields,
    Kept,
    Pictures,
    RequestError,
    check_keys,
    event,
    flag_of,
    limit_of,
    pieces,
    refused,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # no answer has a reasoning item
ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "tool_choice", "tools",
)  # fmt: skip
USED = (*ECHOED, "model", "input", "stream", "store", "text", "include")
USUAL = {"background": False, "parallel_tool_calls": True, "truncation": "disabled", "top_logprobs": 0}
KEYS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "id", "call_id", "name", "namespace", "arguments", "status"),
    "function_call_output": ("type", "id", "call_id", "output", "status"),
    "item_reference": ("type", "id"),
}
TOOL = {name: name for name in ("name", "description", "parameters", "strict")}


def read_request(body: Any, params: SamplingParams, kept: Kept, unenforced: Collection[str] = ()) -> Asked:
    """Parse and check a request's JSON. Raises RequestError."""
    fields = Fields(body, params, USED, unenforced)
    text, include = fields.inner("text", ("format",)), fields.get("include", [])
    schema = fields.schema("text.format", text.get("format"))
    if not isinstance(include, list) or any(name not in INCLUDED for name in include):
        raise RequestError(
            f"include={include!r:.100} is not accepted. Accepted: {INCLUDED}.", param="include"
        )
    messages = check_end((*_earlier(fields, kept), *_messages(fields.get("input", []), kept)), "input")
    system = text_of(fields.get("instructions"), "instructions")
    return Asked(
        messages=(*((ChatMessage("system", system),) if system else ()), *messages),
        tools=read_tools(functions_of(fields, "function", TOOL)),
        schema=schema,
        **fields.choice(fields.get("tool_choice", "auto")),
        one_call=not flag_of(fields, "parallel_tool_calls", default=True),
        max_tokens=limit_of(fields, "max_output_tokens"),
        stream=flag_of(fields, "stream"),
        logprobs=LOGPROBS in include,
        model=str(fields.get("model", MODEL)),
        ignored=tuple(dict.fromkeys(fields.ignored)),
        keep=messages if flag_of(fields, "store", default=True) else None,
        echo={
            **dict.fromkeys(ECHOED),
            "tools": [],
            "tool_choice": "auto",
            "temperature": params.temperature,
            "top_p": params.top_p,
            **USUAL,
            **{name: fields[name] for name in ECHOED if name in fields},
        },
    )


def answer_body(asked: Asked, answer: Answer) -> dict[str, Any]:
    """Return the JSON of the response."""
    new, cut = len(answer.completion.token_ids), answer.finish_reason == "length"
    return {
        **asked.echo,
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model,
        "text": {"format": PLAIN},
        "store": asked.keep is not None,
        "error": None,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, asked.echo.get("tools", ())),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + new,
        },
    }


def events(asked: Asked, answer: Answer) -> Iterator[str]:
    """Yield the same as server-sent events, which are numbered."""
    for number, (kind, fields) in enumerate(_events(answer_body(asked, answer))):
        yield event(kind, sequence_number=number, **fields)


error_body = RequestError.body


def _events(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(body["output"]):
        at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        says = item["type"] == "message"
        opened = {**item, "status": "in_progress", **({"content": []} if says else {"arguments": ""})}
        yield "response.output_item.added", {"output_index": index, "item": opened}
        if says:
            (part,) = item["content"]
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
            for text in pieces(part["text"]):
                yield "response.output_text.delta", {**at, "delta": text, "logprobs": []}
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**at, **said}
            yield "response.content_part.done", {**at, "part": part}
        else:
            for text in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**at, "delta": text}
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, **said}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{body['status']}", {"response": body}


def _output(answer: Answer, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    spaces = {
        tool["name"]: {"namespace": space.get("name")}
        for space in tools
        if space.get("type") == "namespace"
        for tool in space["tools"]
        if "name" in tool
    }
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        part = {
            "type": "output_text",
            "text": answer.content,
            "annotations": [],
            "logprobs": answer.logprobs or [],
        }
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for call in answer.calls:
        name = {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "status": "completed",
        }
        items.append({**name, **spaces.get(call["function"]["name"], {}), **call["function"]})
    return items


def _earlier(body: Mapping[str, Any], kept: Kept) -> tuple[ChatMessage, ...]:
    """Return the conversation that a request continues by the id of its last answer."""
    name = body.get("previous_response_id")
    if name is not None and str(name).removeprefix("resp_") not in kept:
        raise RequestError(
            f"previous_response_id={name!r:.100} is not a stored answer (store=false?). Send "
            "the conversation in input.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return () if name is None else kept[str(name).removeprefix("resp_")]


def _messages(items: Any, kept: Kept) -> tuple[ChatMessage, ...]:
    """Return the messages of an input. A call belongs to the message of the assistant before it."""
    if not isinstance(items, str | list):
        raise refused("input", f" must be a string or a list of items: {items!r:.100}.")
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items):
        where = f"input[{number}]"
        row = _row(item, where, kept)
        if "tool_calls" in row and rows and rows[-1][1]["role"] == "assistant":
            last = rows[-1][1]
            last["tool_calls"] = [*last.get("tool_calls", ()), *row["tool_calls"]]
        else:
            rows.append((where, row))
    picture = Pictures()
    return tuple(read_message(row, where, picture) for where, row in rows)


def _row(item: Any, where: str, kept: Kept) -> dict[str, Any]:
    """Return an item as a message in the form of OpenAI's chat."""
    usual = "item_reference" if isinstance(item, dict) and item.keys() == {"id"} else "message"
    kind = (item.get("type") or usual) if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise refused(where, f" must be an object with a type, one of {', '.join(KEYS)}: {item!r:.100}.")
    check_keys(item, where, KEYS[kind])
    if kind == "item_reference":
        return _referenced(str(item.get("id")), where, kept)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id", ""), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    return {"role": item.get("role"), "content": item.get("content")}


def _referenced(name: str, where: str, kept: Kept) -> dict[str, Any]:
    """Return the text or the call of an earlier answer that an id names."""
    answer = kept.get(name.removeprefix("msg_"))
    if answer is not None:
        return {"role": "assistant", "content": answer[-1].content}
    calls = (call for conversation in kept.values() for call in conversation[-1].tool_calls or ())
    for call in calls:
        if f"fc_{call['id']}" == name:
            return {"role": "assistant", "tool_calls": [call]}
    raise refused(where, f": {name!r:.100} is not an item of a stored answer (store=false?).")
