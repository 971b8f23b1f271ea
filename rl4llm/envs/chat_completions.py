"""Chat completions in OpenAI's format: read and check requests, write answers and errors.

Only fields that decide the conversation and where an answer ends are used: `messages`, `tools`, `stop` and the token
limit. The given sampling parameters always apply: the log-probs that train belong to those of the run. `Asked.overridden`
lists the fields of a request that ask for others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.message import THOUGHTS
from rl4llm.core.types import ChatMessage, Completion, SamplingParams
from rl4llm.envs.tools.formats import ToolCall

MODEL = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ = frozenset((
    "model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "n", "stream",
    "stream_options", "logprobs", "top_logprobs",
))  # fmt: skip
IDLE = frozenset((
    "seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
))  # fmt: skip
"""Fields that do not change an answer; the draws of an episode have separate seeds."""
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"},
    "parallel_tool_calls": True, "repetition_penalty": 1, "min_p": 0, "modalities": ["text"], "functions": [],
}  # fmt: skip
"""Default values of these fields, which ask for nothing."""
PIECE = 16  # characters of a streamed delta


class RequestError(Exception):
    """A refused request, as an OpenAI error."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a chat completion. `may_call` is False if the agent wants no tool calls parsed."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    may_call: bool = True
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    model: str = MODEL
    overridden: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        """Approximate length of the prompt's text in characters, without rendering it."""
        said = sum(
            len(message.content) + len(message.reasoning) + len(str(message.tool_calls or ""))
            for message in self.messages
        )
        return said + len(dumps(list(self.tools)))


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as the agent receives it. `token_texts` is set if the request asked for log-probs."""

    id: str
    model: str
    content: str
    calls: tuple[Mapping[str, Any], ...]
    completion: Completion
    prompt_tokens: int
    token_texts: tuple[str, ...] | None = None

    @property
    def message(self) -> dict[str, Any]:
        calls = {"tool_calls": [dict(call) for call in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.content or (None if calls else ""), **calls}

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish_reason

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        choice = {"index": 0, "message": {**self.message, "refusal": None}, "logprobs": self._logprobs()}
        choice["finish_reason"] = self.finish_reason
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def chunks(self, *, usage: bool, shown: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the same in pieces for a stream: the role, the text, the calls, the finish reason, and token counts if
        asked for. With `shown` the role and that number of characters were sent before.
        """

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            return self.chunk(delta, finish_reason, usage=usage)

        if shown is None:
            yield self.chunk({"role": "assistant", "content": ""}, logprobs=self._logprobs(), usage=usage)
        for start in range(shown or 0, len(self.content), PIECE):
            yield chunk({"content": self.content[start : start + PIECE]})
        for index, call in enumerate(self.calls):
            arguments = call["function"]["arguments"]
            begun = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield chunk({"tool_calls": [{"index": index, **begun}]})
            for start in range(0, len(arguments), PIECE):
                more = {"arguments": arguments[start : start + PIECE]}
                yield chunk({"tool_calls": [{"index": index, "function": more}]})
        yield chunk({}, self.finish_reason)
        if usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def chunk(
        self,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: Any = None,
        usage: bool = False,
    ) -> dict[str, Any]:
        """Return one piece of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [choice], **({"usage": None} if usage else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": None,
        }

    def _usage(self) -> dict[str, int]:
        new = len(self.completion.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }

    def _logprobs(self) -> dict[str, Any] | None:
        if self.token_texts is None:
            return None
        pairs = zip(self.token_texts, self.completion.logprobs, strict=True)
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode(errors="replace")),
                "top_logprobs": [],
            }
            for text, logprob in pairs
        ]
        return {"content": content, "refusal": None}


def read_request(body: Any, params: SamplingParams) -> Asked:
    """Parse and check a request's JSON; `params` are the run's sampling parameters. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("n", 1) != 1:
        raise RequestError(
            f"n={body['n']!r:.100} is not accepted: a request gets one answer. Send n requests instead.",
            param="n",
        )
    if body.get("top_logprobs", 0) != 0:
        raise RequestError(
            "top_logprobs is not accepted: only sampled tokens have log-probs.", param="top_logprobs"
        )
    choice = body.get("tool_choice", "auto")
    return Asked(
        messages=_messages(body.get("messages")),
        tools=_tools(body.get("tools", [])),
        may_call=choice != "none",
        stop=_stops(body.get("stop", ())),
        max_tokens=_max_tokens(body),
        stream=_flag(body, "stream"),
        stream_usage=_flag(_mapping(body, "stream_options"), "include_usage"),
        logprobs=_flag(body, "logprobs"),
        model=str(body.get("model", MODEL)),
        overridden=tuple(_overridden(body, params, choice)),
    )


def read_message(row: Any, where: str = "message") -> ChatMessage:
    """Parse one message. Messages that SDKs write in different ways, such as with no content, null or parts, become
    equal.

    Raises RequestError.
    """
    if not isinstance(row, dict) or not isinstance(row.get("role"), str) or row["role"] not in ROLES:
        raise _wrong(f"{where} must be an object with a role, one of {', '.join(ROLES)}: {row!r:.100}.")
    role, calls = ROLES[row["role"]], row.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise _wrong(f"{where}.tool_calls must be a list: {calls!r:.100}.")
    content = _text(row.get("content"), where)
    if role == "assistant":
        content = content.strip()  # agents trim it too
    thoughts = {name: row[name] for name in THOUGHTS if row.get(name)}
    reasoning = next(iter(thoughts.values()), "")
    if thoughts and (
        role != "assistant" or {str: reasoning} != {type(text): text for text in thoughts.values()}
    ):
        raise _wrong(f"{where}: {', '.join(thoughts)} must be one string, in a message of the assistant.")
    call_id = row.get("tool_call_id")
    return ChatMessage(
        role,
        content,
        tuple(_call(call, where) for call in calls) or None,
        None if role != "tool" or call_id is None else str(call_id),
        reasoning.strip(),
    )


def write_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a call of the policy in OpenAI's format."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _messages(rows: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(rows, list) or not rows:
        raise _wrong("messages must be a list with at least one message.")
    messages = tuple(read_message(row, f"messages[{number}]") for number, row in enumerate(rows))
    if messages[-1].role == "assistant":
        raise _wrong("messages must end with a message to answer, not with one of the assistant.")
    return messages


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="messages")


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        text = "".join(part["text"] for part in content)
    else:
        raise _wrong(f"{where}.content must be a string or a list of text parts: the policy reads only text.")
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.tool_calls must have functions with names: {call!r:.100}.")
    name, arguments = function["name"], function.get("arguments") or "{}"
    try:  # chat templates expect objects, and agents may format the same one differently
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = read if isinstance(read, dict) else arguments
    except (ValueError, RecursionError):
        pass
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    listed = tools if isinstance(tools, list) else [tools]
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in listed]
    if not all(
        isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions
    ):
        raise RequestError(
            'tools must be a list of {"type": "function", "function": {"name": ...}}.', param="tools"
        )
    return tuple(tools)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(text, str) and text for text in stops):
        raise RequestError(
            f"stop={stop!r:.100} is not accepted. Accepted: a string, or a list of strings.", param="stop"
        )
    return stops


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in body:
            limit = body[name]
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise RequestError(
                    f"{name}={limit!r:.100} is not accepted. Accepted: a whole number, at least 1.",
                    param=name,
                )
            return limit
    return None


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name}={value!r:.100} is not accepted. Accepted: true or false.", param=name)
    return value


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"{name}={value!r:.100} is not accepted. Accepted: an object.", param=name)
    return value


def _overridden(body: Mapping[str, Any], params: SamplingParams, choice: Any) -> Iterator[str]:
    """Yield the names of fields that ask for something else than the run's parameters."""
    own = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    for name in sorted(body.keys() - READ - IDLE):
        if name not in own | NEUTRAL or body[name] != (own | NEUTRAL)[name]:
            yield name
    if choice not in ("auto", "none"):
        yield "tool_choice"


def dumps(body: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return compact JSON, as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
