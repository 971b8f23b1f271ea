"""Anthropic's Messages: the wire of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.chat_completions import check_end, functions_of, read_message, read_tools, text_of
from rl4llm.envs.wire import (
    MODEL,
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
    stops_of,
)

USED = (
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "output_config",
    "output_format", "context_management",
)  # fmt: skip
KEYS = {
    "text": ("type", "text", "cache_control", "citations"),
    "image": ("type", "source", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
TOOL = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read_request(body: Any, params: SamplingParams, kept: Kept, unenforced: Collection[str] = ()) -> Asked:
    """Parse and check a request's JSON. Raises RequestError."""
    fields = Fields(body, params, USED, unenforced)
    config = fields.inner("output_config", ("format",))
    choice = fields.inner("tool_choice", ("type", "name", "disable_parallel_tool_use"))
    schema = fields.schema("output_format", fields.get("output_format"))
    schema = fields.schema("output_config.format", config.get("format")) or schema
    named = {"name": choice["name"]} if "name" in choice else {}
    _check_edits(fields.inner("context_management", ("edits",)).get("edits", []))
    system, picture = text_of(fields.get("system"), "system"), Pictures()
    rows = fields.get("messages")
    messages = (
        message
        for number, row in enumerate(rows if isinstance(rows, list) else [])
        for message in _messages(row, f"messages[{number}]", picture)
    )
    return Asked(
        messages=check_end((*((ChatMessage("system", system),) if system else ()), *messages), "messages"),
        tools=read_tools(functions_of(fields, "custom", TOOL)),
        schema=schema,
        **fields.choice({"type": choice.get("type", "auto"), **named}, {"type": "auto"}, {"type": "none"}),
        one_call=choice.get("disable_parallel_tool_use") is True,
        stop=stops_of(fields, "stop_sequences"),
        max_tokens=limit_of(fields, "max_tokens"),
        stream=flag_of(fields, "stream"),
        model=str(fields.get("model", MODEL)),
        ignored=tuple(dict.fromkeys(fields.ignored)),
    )


def answer_body(asked: Asked, answer: Answer) -> dict[str, Any]:
    """Return the JSON of the response."""
    ends = {"tool_calls": "tool_use", "length": "max_tokens"}
    text = [{"type": "text", "text": answer.content}] if answer.content else []
    said = [(call["id"], call["function"]) for call in answer.calls]
    calls = [
        {"type": "tool_use", "id": name, "name": function["name"], "input": json.loads(function["arguments"])}
        for name, function in said
    ]
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [*text, *calls],
        "stop_reason": ends.get(answer.finish_reason, "stop_sequence" if answer.stopped_at else "end_turn"),
        "stop_sequence": answer.stopped_at if answer.finish_reason == "stop" else None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.completion.token_ids)},
    }


def events(asked: Asked, answer: Answer) -> Iterator[str]:
    """Yield the same as server-sent events."""
    body = answer_body(asked, answer)
    ended = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**body, **dict.fromkeys(ended), "content": [], "usage": {**body["usage"], "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(body["content"]):
        says = block["type"] == "text"
        opened = {**block, **({"text": ""} if says else {"input": {}})}
        yield event("content_block_start", index=index, content_block=opened)
        for text in pieces(block["text"] if says else json.dumps(block["input"], ensure_ascii=False)):
            delta = (
                {"type": "text_delta", "text": text}
                if says
                else {"type": "input_json_delta", "partial_json": text}
            )
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=ended, usage=body["usage"])
    yield event("message_stop")


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the JSON of a refusal."""
    kind = "api_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _messages(row: Any, where: str, picture: Pictures) -> Iterator[ChatMessage]:
    """Yield the messages of a turn: results of tools and what a user says are separate messages."""
    role = row.get("role") if isinstance(row, dict) else None
    if role not in ("user", "assistant", "system"):
        raise refused(where, f" must be an object with a role, one of user, assistant, system: {row!r:.100}.")
    check_keys(row, where, ("role", "content"))
    content = row.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    made: dict[str, Any] = {"role": role, "content": []}
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        kind = _kind(block, role, place)
        if kind == "tool_result":
            if made["content"]:
                yield read_message(made, where, picture)
                made = {"role": role, "content": []}
            result = {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": block.get("content"),
            }
            yield replace(read_message(result, place, picture), failed=block.get("is_error") is True)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            made.setdefault("tool_calls", []).append({"id": block.get("id", ""), "function": function})
        elif kind == "thinking":
            made["reasoning_content"] = made.get("reasoning_content", "") + str(block.get("thinking"))
        else:
            made["content"].append(block)
    if made["content"] or role == "assistant" or not blocks:
        yield read_message(made, where, picture)


def _kind(block: Any, role: str, where: str) -> str:
    """Return the type of a block. Raises RequestError for one that is not read in a message of this role."""
    kinds = ("text", "thinking", "tool_use") if role == "assistant" else ("text", "image", "tool_result")
    kind = str(block.get("type")) if isinstance(block, dict) else ""
    if kind not in kinds:
        raise refused(where, f" must be an object with a type, one of {', '.join(kinds)}: {block!r:.100}.")
    check_keys(block, where, KEYS[kind])
    return kind


def _check_edits(edits: Any) -> None:
    """Raise RequestError for edits of the context that drop something; to keep all is what happens."""
    for edit in edits if isinstance(edits, list) else [edits]:
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            raise RequestError(
                f"context_management: the edit {edit!r:.100} is not accepted, since nothing is dropped here. Accepted: "
                "edits that keep all.",
                param="context_management",
            )
