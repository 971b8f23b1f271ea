"""How models write tool calls: one parser for each format, chosen by the chat template.

    hermes     <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3     {"name": "f", "parameters": {...}}; {...}          also behind <|python_tag|>
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {...}}]    or [TOOL_CALLS]f[ARGS]{...}
    deepseek   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

A parser gets a turn with its special tokens, raises for nothing, and finds calls in order. What is meant for a call but is
none becomes one with a `problem`, for the model to learn from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry

MAX_CALL_CHARS = 100_000
_DECODER = json.JSONDecoder()
_PYTHON_TAG, _TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MISTRAL_ONE = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_FENCE = re.compile(r"\s*(\S+)\s*```(?:json)?(.*)```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; where it is none, `problem` says why."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are found, and where a turn that calls is over.

    Args:
        parse: the calls of a turn.
        marks: one of them stands in a chat template of this format; without any, it has to be chosen by name.
        ends_call: the text behind one call, "" where there is none.
        ends_calls: the text behind the last call of a turn, "" where only the end of the turn tells.
        begins: what the first call of a turn begins with, one of them.
    """

    parse: Callable[[str], Iterator[ToolCall]]
    marks: tuple[str, ...] = ()
    ends_call: str = ""
    ends_calls: str = ""
    begins: tuple[str, ...] = ()

    def beside(self, text: str) -> str:
        """What a turn with calls says before them; all of it where nothing tells where they begin."""
        places = [place for place in map(text.find, self.begins) if place >= 0]
        return text[: min(places)] if places else text

    def stop(self, max_calls: int) -> str:
        """Where generation may stop when a turn has at most so many calls; "" for nowhere."""
        return self.ends_calls or (self.ends_call if max_calls == 1 else "")


def _hermes(text: str) -> Iterator[ToolCall]:
    for body, end in _HERMES.findall(text):
        yield _read(body, "arguments") if end else ToolCall(problem="the call is not closed by </tool_call>")


def _llama3(text: str) -> Iterator[ToolCall]:
    before, tag, behind = text.partition(_PYTHON_TAG)
    rest = (behind if tag else before).strip()
    if tag and not rest.startswith("{"):
        yield ToolCall(problem='a call must be {"name": ..., "parameters": {...}}')
    elif not tag and not ('"name"' in rest and re.search('"(parameters|arguments)"', rest)):
        return  # an answer, which may be JSON too
    while rest.startswith("{"):
        first = _first(rest)
        yield _read(first, "parameters")
        rest = rest[len(first) :].lstrip(" ;,\n").removeprefix(_PYTHON_TAG)


def _mistral(text: str) -> Iterator[ToolCall]:
    bare = [text] if text.lstrip().startswith('[{"name"') else []  # a text without its special tokens
    for body in text.split(_TOOL_CALLS)[1:] or bare:
        named = _MISTRAL_ONE.match(body)
        if named:
            yield _read(_first(body[named.end() :].lstrip()), "arguments", named[1])
        else:
            yield from _listed(_first(body.lstrip()))


def _deepseek(text: str) -> Iterator[ToolCall]:
    for head, tail, end in _DEEPSEEK.findall(text):
        fenced = _FENCE.fullmatch(tail)
        if not end:
            yield ToolCall(problem="the call is not closed by <｜tool▁call▁end｜>")
        elif fenced and head.strip() == "function":
            yield _read(fenced[2], "arguments", fenced[1])
        else:
            yield _read(tail, "arguments", head.strip())


FORMATS: Registry[CallFormat] = Registry("env.format")
for _name, _format in {
    "mistral": CallFormat(_mistral, (_TOOL_CALLS,), begins=(_TOOL_CALLS, "[{")),
    "deepseek": CallFormat(
        _deepseek,
        ("<｜tool▁calls▁begin｜>",),
        ends_call="<｜tool▁call▁end｜>",
        ends_calls="<｜tool▁calls▁end｜>",
        begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    "hermes": CallFormat(_hermes, ("<tool_call>",), ends_call="</tool_call>", begins=("<tool_call>",)),
    "llama3": CallFormat(_llama3, (_PYTHON_TAG, "<|eom_id|>", '"parameters":'), begins=(_PYTHON_TAG, "{")),
}.items():
    FORMATS.register(_name)(_format)


def call_format(name: str, tokenizer: Any, tools: list[Any] | None = None) -> CallFormat:
    """The format of that name; "auto" is the one that the chat template has marks of, Hermes where it has none.

    A tokenizer that brings a `response_template` is parsed by that.
    """
    if name != "auto":
        return FORMATS[name]
    if getattr(tokenizer, "response_template", None):
        return CallFormat(lambda text: _templated(tokenizer, text))
    template = (tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else "") or ""
    if "<function=" in template:
        raise ConfigError(
            f"env.format=auto: the chat template of {tokenizer.name_or_path or 'the tokenizer'} asks for calls as "
            f"<function=...>, which is none of {', '.join(FORMATS)}. Next step: give the tokenizer a `response_template`, "
            "which transformers can parse, or set env.format and a chat template of that format."
        )
    return next((known for known in _known() if any(mark in template for mark in known.marks)), FORMATS["hermes"])


def _known() -> Iterator[CallFormat]:
    """The most telling marks first: other templates name parameters as well."""
    return (FORMATS[name] for name in ("mistral", "deepseek", "hermes", "llama3"))


def _templated(tokenizer: Any, text: str) -> Iterator[ToolCall]:
    try:
        calls = tokenizer.parse_response(text, prefix="").get("tool_calls") or []
        yield from [_call(call.get("function") or call, "arguments") for call in calls]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield _not_a_call(error)


def _listed(text: str) -> Iterator[ToolCall]:
    try:
        yield from [_call(call, "arguments") for call in _loaded(text)]
    except (ValueError, TypeError) as error:
        yield _not_a_call(error)


def _read(text: str, key: str, name: str = "") -> ToolCall:
    """The call that a JSON object is, with its arguments under `key`; with a `name` the text is only the arguments."""
    try:
        value = _loaded(text)
        return _call({"name": name, key: value} if name else value, key)
    except ValueError as error:
        return _not_a_call(error)


def _call(value: Any, key: str) -> ToolCall:
    """Models that know several formats mix up the keys of arguments, and quote objects."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f'a call must be {{"name": ..., "{key}": {{...}}}}')
    arguments: Any = next((value[other] for other in (key, "arguments", "parameters") if other in value), {})
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return ToolCall(name, arguments)


def _not_a_call(error: Exception) -> ToolCall:
    return ToolCall(problem=f"the call cannot be read: {error}"[:200])


def _loaded(text: str) -> Any:
    if len(text) > MAX_CALL_CHARS:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_CALL_CHARS} are accepted")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _first(text: str) -> str:
    """The JSON value that a text starts with; the whole text where it starts with none."""
    if len(text) > MAX_CALL_CHARS:
        return text
    try:
        return text[: _DECODER.raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text
