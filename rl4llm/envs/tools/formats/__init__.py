"""Parse tool calls: each format has one parser, and the chat template shows which one is needed.

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3       {"name": "f", "parameters": {...}}; {...}          also after <|python_tag|>
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}]    or [TOOL_CALLS]f[ARGS]{...}
    deepseek     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    function     <function=f><parameter=x>1</parameter></function>  or <function=f>{...}</function>
    invoke       <invoke name="f"><parameter name="x">1</parameter></invoke>      with any prefix of the tags
    glm          <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>

`FORMATS` has them all, each with an example. A parser gets a turn with its special tokens, never raises, and yields its
calls in order. A malformed call gets a `problem`, which the model can learn from. The time is linear in the length.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from rl4llm.core.errors import ConfigError, TemplateError
from rl4llm.core.message import after_thinking
from rl4llm.core.registry import Registry
from rl4llm.core.types import ChatMessage
from rl4llm.data.template import ChatTemplate, decode, opening
from rl4llm.envs.tools.arguments import parts, unmet
from rl4llm.envs.tools.formats.calls import (
    MAX_CALL_CHARS,
    CallFormat,
    ToolCall,
    Written,
    as_call,
    checked,
    loaded,
    not_a_call,
)
from rl4llm.envs.tools.formats.python import literal

__all__ = [
    "FORMATS",
    "MAX_CALL_CHARS",
    "CallFormat",
    "ToolCall",
    "call_format",
    "stray_calls",
    "written_call",
]

FORMATS: Registry[CallFormat] = Registry(
    "env.format",
    table={
        "apertus": "rl4llm.envs.tools.formats.objects:APERTUS",
        "cohere": "rl4llm.envs.tools.formats.objects:COHERE",
        "deepseek": "rl4llm.envs.tools.formats.objects:DEEPSEEK",
        "function": "rl4llm.envs.tools.formats.tagged:FUNCTION",
        "functionary": "rl4llm.envs.tools.formats.objects:FUNCTIONARY",
        "gemma": "rl4llm.envs.tools.formats.objects:GEMMA",
        "gigachat": "rl4llm.envs.tools.formats.objects:GIGACHAT",
        "glm": "rl4llm.envs.tools.formats.tagged:GLM",
        "granite": "rl4llm.envs.tools.formats.objects:GRANITE",
        "harmony": "rl4llm.envs.tools.formats.objects:HARMONY",
        "hermes": "rl4llm.envs.tools.formats.objects:HERMES",
        "invoke": "rl4llm.envs.tools.formats.tagged:INVOKE",
        "json": "rl4llm.envs.tools.formats.objects:JSON",
        "kimi": "rl4llm.envs.tools.formats.objects:KIMI",
        "kimi_k3": "rl4llm.envs.tools.formats.tagged:KIMI_K3",
        "lfm2": "rl4llm.envs.tools.formats.python:LFM2",
        "llama3": "rl4llm.envs.tools.formats.objects:LLAMA3",
        "minimax_m3": "rl4llm.envs.tools.formats.tagged:MINIMAX_M3",
        "mistral": "rl4llm.envs.tools.formats.objects:MISTRAL",
        "nemotron": "rl4llm.envs.tools.formats.objects:NEMOTRON",
        "python": "rl4llm.envs.tools.formats.python:PYTHON",
        "solar": "rl4llm.envs.tools.formats.objects:SOLAR",
        "tool_calls": "rl4llm.envs.tools.formats.objects:TOOL_CALLS",
    },
)
# what is no mark of a format alone begins otherwise, such as { and ```python
_MARK = re.compile(r"[<\[\]].*\w")
_PROBE = ToolCall(
    "probe_lookup", {"expression": '37 + "48"\n<b> {c}', "code": "0085", "count": 85, "words": ["a", "b"]}
)
_KINDS: Mapping[type, Mapping[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    list: {"type": "array", "items": {"type": "string"}},
}
_SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {**_KINDS[type(value)], "description": name} for name, value in _PROBE.arguments.items()
            },
            "required": list(_PROBE.arguments),
        },
    },
}
logger = logging.getLogger("rl4llm.envs")


class _CallsAlone(ChatMessage):
    """A message with calls and null as its content, as OpenAI writes it; some templates write calls in no other."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "content": None}


def call_format(
    name: str,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    shown: bool = True,
    template_args: Mapping[str, Any] | None = None,
) -> CallFormat:
    """Return the format of a name, whose arguments get the types that the schemas of `tools` ask for.

    "auto" takes the format in which a call that the chat template writes is read back; `shown` tells whether the template
    gets the schemas. A tokenizer with a `response_template` parses calls itself. Raises ConfigError if no format reads it.
    """
    if name != "auto":
        form = FORMATS[name]
    elif getattr(tokenizer, "response_template", None):
        form = CallFormat(lambda text: _templated(tokenizer, text))
    else:
        form = FORMATS[_detected(ChatTemplate(tokenizer, [_SCHEMA] if shown else None, template_args))]
    return _bound(form, tools) if tools else form


def stray_calls(text: str, tools: Iterable[str], form: CallFormat) -> list[ToolCall]:
    """Return a call that cannot be read if a turn without calls in a form has one of a tool in another model's form."""
    called = {name for name in tools if name in text}
    if called and any(call.name in called for name in FORMATS for call in FORMATS[name].parse(text)):
        return [ToolCall(problem=f"the call is not in the form that is read here: {form.example}"[:200])]
    return []


def written_call(template: ChatTemplate, call: ToolCall = _PROBE) -> str:
    """Return the turn of a template that makes one call, without the generation prompt; "" if it writes no calls."""
    arguments = dict(call.arguments)
    for message, fields in product((ChatMessage, _CallsAlone), (arguments, json.dumps(arguments))):
        row = {"type": "function", "id": "call00001", "function": {"name": call.name, "arguments": fields}}
        for messages in (opening(system=False), opening(system=True)):
            try:
                text = template.text([*messages, message("assistant", "", (row,))], prompt=False)
                headers = [template.text(messages, prompt=prompt) for prompt in (True, False)]
            except TemplateError:  # it may write the call in another form
                continue
            turn = text.removeprefix(next((header for header in headers if text.startswith(header)), ""))
            words = [value for value in arguments.values() if isinstance(value, str) and value.isalnum()]
            if all(word in turn for word in words):
                return turn
    return ""


def _detected(template: ChatTemplate) -> str:
    """Return the name of the format in which a template writes calls."""
    turn = written_call(template)
    if not turn:
        return _by_default(template)
    turn = decode(template.tokenizer, template.encode(turn))
    with suppress(TemplateError):  # the renderer reports a missing end; no model samples what is behind it
        turn = turn.partition(template.end.token)[0]
    turn = max(turn, after_thinking(turn), key=lambda text: (_PROBE.name in text, -len(text)))
    reading = [name for name in FORMATS if list(_bound(FORMATS[name], [_SCHEMA]).parse(turn)) == [_PROBE]]
    if not reading:
        call = turn[max(0, turn.find(_PROBE.name) - 100) :][:400]
        raise _refused(template, f"writes a call of {_PROBE.name} as {call!r}, which no format reads back")

    def likeness(name: str) -> tuple[int, int]:
        begin = max((len(begin) for begin in FORMATS[name].begins if begin in turn), default=0)
        return begin, sum(word in turn for word in re.findall(r"\w{4,}", FORMATS[name].example))

    return max(reading, key=likeness)


def _by_default(template: ChatTemplate) -> str:
    """Return hermes for a template that writes no calls; raise ConfigError if it seems to know another format."""
    try:
        prompt = template.text(opening(system=False))
    except TemplateError:  # the renderer tells why no prompt can be rendered
        prompt = ""
    if template.tools and _PROBE.name in prompt:
        raise _refused(template, "shows tools, but writes no calls")
    source = template.tokenizer.get_chat_template(tools=template.tools)
    marks = {mark: name for name in FORMATS for mark in FORMATS[name].begins if _MARK.match(mark)}
    if names := {marks[mark] for mark in marks if mark in source}:
        raise _refused(template, f"has marks of {', '.join(sorted(names))}, but writes no calls")
    logger.warning(
        "env.format=auto: the chat template of %s writes no tool calls, so they are read as hermes: %s",
        template.name,
        FORMATS["hermes"].example,
    )
    return "hermes"


def _refused(template: ChatTemplate, reason: str) -> ConfigError:
    return ConfigError(
        f"env.format=auto: the chat template of {template.name} {reason}. Set env.format to the one that the model writes, "
        f"or register a CallFormat: {', '.join(FORMATS)}."
    )


def _bound(written: CallFormat, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
    """Return a format whose arguments have the types of the tools' schemas."""
    functions = [tool.get("function") or tool for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}

    def parse(text: str) -> Iterator[ToolCall]:
        for call in written.parse(text):
            yield replace(call, arguments=typed(dict(call.arguments), schemas.get(call.name, {})))

    return replace(written, parse=parse)


def _templated(tokenizer: Any, text: str) -> Iterator[ToolCall]:
    try:
        calls = tokenizer.parse_response(text, prefix="").get("tool_calls") or []
        yield from [as_call(call) for call in calls]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield not_a_call(error)


def typed(value: Any, schema: Any) -> Any:
    """Return a value in which each `Written` text is the value that its schema asks for; by default, it stays a text.

    A number such as 3.0 becomes 3 where the schema asks for an integer.
    """
    if isinstance(value, Written):
        return _read(str(value), schema)
    if isinstance(value, float) and value.is_integer() and unmet(value, schema):
        return int(value) if unmet(int(value), schema) is None else value
    inner = [typed(item, within) for item, within in parts(value, schema)]
    if isinstance(value, dict):
        return dict(zip(value, inner, strict=True))
    return inner if isinstance(value, list) else value


def _read(text: str, schema: Any) -> Any:
    """Return the value that a text writes in JSON or Python, if the schema allows that value."""
    for parse in (loaded, literal):
        try:
            checked("", {"": (value := parse(text))})
        except (ValueError, SyntaxError):
            continue
        value = typed(value, schema)
        if not isinstance(value, str) and unmet(value, schema) is None:
            return value
    return text
