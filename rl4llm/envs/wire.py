"""Requests to the policy and its answers, whichever API carries them.

A wire is a module that reads the requests of an API and writes answers in its form, see `Wire`. Only fields that decide
the conversation and where an answer ends are used. The given sampling parameters always apply: the log-probs that train
belong to those of the run. Other fields are ignored if they are scalars or metadata, and `Asked.ignored` lists them. What
may hold content, such as a list of objects, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl4llm.core.errors import DataError
from rl4llm.core.images import Picture
from rl4llm.core.registry import Registry, load
from rl4llm.core.types import ChatMessage, Completion, SamplingParams

MODEL = "policy"
PIECE = 16  # characters of a streamed delta
MOST_STOPS = 64  # which are looked for in every token
TOO_DEEP = "The request is nested too deeply. Send flatter JSON."
PLAIN = {"type": "text"}
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}, "n": 1,
    "best_of": 1, "echo": False, "top_logprobs": 0, "modalities": ["text"], "functions": [], "truncation": "disabled",
    "thinking": {"type": "disabled"},
}  # fmt: skip
"""Values that ask for nothing."""
METADATA = {
    "seed", "user", "metadata", "client_metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "cache_control", "stream_options", "speed", "inference_geo",
    "background",
}  # fmt: skip
"""Fields that never change an answer; the draws of an episode have separate seeds."""
_CONTENT = "it is content that this API does not read. Send it as messages"
REFUSED = {
    "n": "a request gets one answer. Send n requests instead",
    "best_of": "a request gets one answer. Send n requests instead",
    "echo": "an answer has new tokens alone",
    "suffix": "an answer ends where the policy ends it",
    "top_logprobs": "only sampled tokens have log-probs",
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        "the run renders prompts. Set env.template_args instead",
    ),
    **dict.fromkeys(("system", "instructions", "messages", "input", "documents", "prefix"), _CONTENT),
    **dict.fromkeys(
        ("conversation", "prompt", "container", "previous_response_id"),
        "nothing is stored here. Send the conversation itself",
    ),
}
"""Fields that change what an answer is or answers to, where a wire does not read them."""
FORCING = {
    "function_call": "tool_choice",
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "grammar",
            "regex",
        ),
        "response_format",
    ),
}
"""Fields of some servers that force an answer, and what `env.unenforced` calls that."""
Kept = Mapping[str, tuple[ChatMessage, ...]]
"""The id of an earlier answer -> the conversation with it."""


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
    """A request for an answer. `may_call` is False if the agent wants no tool calls parsed, and `one_call` ends an answer
    after its first. `forced` names the tools that an answer has to call one of, () for any; `schema` is that of a forced
    format and the name of its field.

    `keep` is the conversation that later requests may continue by the answer's id; None if they may not. `echo` has the
    fields that the answer repeats.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    may_call: bool = True
    forced: tuple[str, ...] | None = None
    schema: tuple[str, Mapping[str, Any]] | None = None
    one_call: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    model: str = MODEL
    ignored: tuple[str, ...] = ()
    keep: tuple[ChatMessage, ...] | None = None
    echo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def characters(self) -> int:
        """Approximate length of the prompt's text in characters, without rendering it."""
        length = sum(
            len(message.content) + len(message.reasoning) + len(str(message.tool_calls or ""))
            for message in self.messages
        )
        return length + len(dumps(list(self.tools)))


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as the agent receives it. `token_texts` is set if the request asked for log-probs; `stopped_at` is the
    stop string of the request that ended it.
    """

    id: str
    model: str
    content: str
    calls: tuple[Mapping[str, Any], ...]
    completion: Completion
    prompt_tokens: int
    token_texts: tuple[str, ...] | None = None
    stopped_at: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant's message, in the form of OpenAI's chat."""
        calls = {"tool_calls": [dict(call) for call in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.content or (None if calls else ""), **calls}

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish_reason

    @property
    def logprobs(self) -> list[dict[str, Any]] | None:
        """Return the log-probs of its tokens in OpenAI's form; None if the request did not ask for them."""
        if self.token_texts is None:
            return None
        pairs = zip(self.token_texts, self.completion.logprobs, strict=True)
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
            for text, logprob in pairs
        ]  # fmt: skip


class Wire(Protocol):
    """An API: reads its requests, and writes answers, streams of server-sent events and errors in its form."""

    def read_request(
        self, body: Any, params: SamplingParams, kept: Kept, unenforced: Collection[str] = ()
    ) -> Asked: ...
    def answer_body(self, asked: Asked, answer: Answer) -> dict[str, Any]: ...
    def events(self, asked: Asked, answer: Answer) -> Iterator[str]: ...
    def error_body(self, error: RequestError) -> dict[str, Any]: ...


WIRES: Registry[Wire] = Registry(
    "wire", table={"chat/completions": "rl4llm.envs.chat_completions"}, group="rl4llm.wires"
)
"""The wires by their paths below /v1."""


def wire_of(path: str) -> Wire:
    """Return the API that a path names, by default OpenAI's chat."""
    name = next((name for name in WIRES if f"/v1/{name}" in path), "chat/completions")
    return WIRES[name]


def error_of(error: Exception, method: str, path: str) -> tuple[dict[str, Any], int]:
    """Return the JSON of an error of a handler in the form of the API that the path names, and its HTTP status.

    Errors of aiohttp have a `status` and a `text`.
    """
    if isinstance(error, RecursionError):
        error = RequestError(TOO_DEEP)
    elif not isinstance(error, RequestError):
        status = getattr(error, "status", 500)
        error = RequestError(f"{method} {path[-100:]}: {getattr(error, 'text', error)}", status=status)
    return wire_of(path).error_body(error), error.status


def event(kind: str, **fields: Any) -> str:
    """Return a server-sent event with a name, which its JSON repeats as its type."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n"


def pieces(text: str, start: int = 0) -> list[str]:
    """Return a text from a character on, in the pieces of a stream."""
    return [text[at : at + PIECE] for at in range(start, len(text), PIECE)]


def read_json(content: bytes) -> Any:
    """Return the JSON of a request. Raises RequestError.

    Lone surrogates, which neither tokenizers nor answers accept, are replaced.
    """
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
        return json.loads(dumps(body).encode(errors="replace")) if "\\ud" in text.lower() else body
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}"[:300]) from error


def dumps(body: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return compact JSON, as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


class Fields(dict[str, Any]):
    """The fields of a request that are set. `ignored` has the names of those that change nothing.

    `used` are those that its wire reads. Raises RequestError for content that is not read: lists of objects, and what is in
    REFUSED. A list of names would age, since SDKs add metadata every month.
    """

    def __init__(
        self, body: Any, params: SamplingParams, used: Collection[str], unenforced: Collection[str] = ()
    ):
        if not isinstance(body, dict):
            raise RequestError("The body must be a JSON object.")
        super().__init__({name: value for name, value in body.items() if value is not None})
        self.unenforced = unenforced
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        neutral = {**NEUTRAL, **sampling}
        self.ignored = [
            name
            for name in sorted(self.keys() - set(used) - METADATA)
            if name not in neutral or self[name] != neutral[name]
        ]
        for name in tuple(self.ignored):
            if name in FORCING:
                self._passes(FORCING[name], name)
            elif name in REFUSED or not is_metadata(self[name]):
                why = REFUSED.get(name, "it is content that is not read. Remove it")
                raise RequestError(f"{name}={self[name]!r:.100} is not accepted: {why}.", param=name)

    def inner(self, name: str, used: Collection[str]) -> Mapping[str, Any]:
        """Return a field that is an object. Only these of its keys are read."""
        value = mapping_of(self, name)
        self.ignore(name, value, used)
        return value

    def ignore(self, name: str, value: Mapping[str, Any], used: Collection[str]) -> None:
        """Count the other keys of an object as ignored. Raises RequestError where they are content."""
        for key in sorted(key for key in value.keys() - set(used) if value[key] is not None):
            if not is_metadata(value[key]):
                raise RequestError(f"{name}.{key}={value[key]!r:.100} is not read. Remove it.", param=name)
            self.ignored.append(f"{name}.{key}")

    def choice(self, value: Any, auto: Any = "auto", none: Any = "none") -> dict[str, Any]:
        """Return what a `tool_choice` means for `Asked`. Raises RequestError for one that is not read."""
        row = value if isinstance(value, dict) else {"type": value}
        inner = row.get("function", row)
        name = inner.get("name") if isinstance(inner, dict) else None
        forced = () if row.get("type") in ("required", "any") else (name,) if isinstance(name, str) else None
        free = value in (auto, none) or self._passes("tool_choice", "tool_choice", forced is not None)
        return {"may_call": value != none, "forced": None if free else forced}

    def schema(self, name: str, value: Any) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name and the schema of an answer's format, None for plain text. Raises RequestError."""
        row = value if isinstance(value, dict) else {}
        row = row.get("json_schema", row)
        schema = {"type": "object"} if row.get("type") == "json_object" else row.get("schema")
        known = isinstance(schema, dict)
        free = value in (None, PLAIN) or self._passes("response_format", name, known)
        return None if free else (name, schema)

    def _passes(self, switch: str, name: str, known: bool = False) -> bool:
        """Return whether a field passes unenforced. Raises RequestError for an unknown one that does not."""
        if switch in self.unenforced:
            self.ignored.append(name.partition(".")[0])
        elif not known:
            raise unforced(switch, name, "its form is not read")
        return switch in self.unenforced


def unforced(switch: str, name: str, why: str) -> RequestError:
    """Return the error of a field that cannot force an answer."""
    kind = "call" if switch == "tool_choice" else "format"
    problem = f"{name} is not accepted: no {kind} can be forced, since {why}"
    switch = f"In training, env.unenforced=[{switch}] ignores it."
    return RequestError(f"{problem}. {switch}", param=name.partition(".")[0])


def is_metadata(value: Any) -> bool:
    """Return whether a JSON value has no list of objects or lists, as content has."""
    if isinstance(value, dict):
        return all(map(is_metadata, value.values()))
    return not (isinstance(value, list) and any(isinstance(item, dict | list) for item in value))


class Pictures:
    """Reads the images of one request, within the limits of a row; nothing is loaded before the first."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, address: Any, where: str) -> Picture:
        """Return the picture of a data URI. Raises RequestError for anything else."""
        if not isinstance(address, str) or not address.startswith("data:"):
            accepted = "nothing is downloaded. Accepted: its data, such as data:image/png;base64,..."
            raise refused(where, f": the image {address!r:.80} is not accepted, and {accepted}")
        self._count += 1
        if self._count > (most := load("rl4llm.data.images:MAX_IMAGES")):
            raise refused(where, f": the request has more than {most} images.")
        try:
            picture: Picture = load("rl4llm.data.images:read_picture")(address)
        except DataError as error:
            raise refused(where, f": {error}") from error
        return picture


def check_keys(row: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Raise RequestError if a part of a request has keys that are not read."""
    if unread := sorted(name for name in row.keys() - set(known) if row[name] not in (None, "", [], {}, ())):
        raise refused(where, f".{unread[0]} is not read. Accepted: {', '.join(sorted(known))}.")


def refused(where: str, problem: str) -> RequestError:
    """Return the error of a part of a request, such as `messages[3]`."""
    return RequestError(where + problem, param=where.partition("[")[0])


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the token limit that the first of these fields sets."""
    for name in names:
        if name in body:
            positive = type(body[name]) is int and body[name] >= 1
            return int(accepted(name, body[name], positive, "a whole number, at least 1"))
    return None


def stops_of(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings of a field."""
    stop = body.get(name, ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    texts = len(stops) <= MOST_STOPS and all(isinstance(text, str) and text for text in stops)
    accepted(name, stop, texts, f"a string, or a list of at most {MOST_STOPS} strings")
    return stops


def flag_of(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = body.get(name, default)
    return bool(accepted(name, value, isinstance(value, bool), "true or false"))


def mapping_of(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty one if it is absent."""
    value = body.get(name, {})
    return dict(accepted(name, value, isinstance(value, dict), "an object"))


def accepted(name: str, value: Any, holds: bool, what: str) -> Any:
    """Return the value of a field if it is accepted. Raises RequestError for another one."""
    if not holds:
        message = f"{name}={value!r:.100} is not accepted. Accepted: {what}."
        raise RequestError(message, param=name.partition(".")[0])
    return value
