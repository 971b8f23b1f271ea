"""Calls whose arguments are JSON objects: with the name in the object, between marks, or with the name before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rl4llm.envs.tools.formats.calls import (
    ARGUMENTS,
    NAME,
    CallFormat,
    ToolCall,
    as_call,
    bodies,
    not_a_call,
    not_closed,
    read,
    values,
    written_id,
)
from rl4llm.envs.tools.formats.tagged import FUNCTION

_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = re.compile(
    r"\[TOOL_CALLS\](?:\s*(?P<name>[^\s\[{]{1,200})\s*(?:\[CALL_ID\](?P<id>[^\[]{0,200}))?(?:\[ARGS\]|(?={)))?"
)
_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")  # the templates refuse any other
_KEYS = re.compile('"(parameters|arguments)"')
_OBJECT = re.compile(r'\{\s*"(?:name|tool_name|function|type|id|parameters|arguments)"\s*:')
_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:][^"{}\[\],:]{0,199}):')
_BARE_WORD = re.compile(r"([:,\[]\s*)(None|True|False)(?=\s*[,}\]])")
_WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects with a name and arguments between two marks, the first a pattern: one, several, or a list.

    Without an `end`, the first value behind each mark counts. With `keyed`, a call is ``{"f": {...}}``. Marks within the
    texts of a value are no marks.
    """

    begin: str
    end: str = ""
    keyed: bool = False

    def __call__(self, text: str) -> Iterator[ToolCall]:
        for body, _ in bodies(text, re.compile(self.begin), self.end):
            if body is None:
                yield not_closed(self.end)
                continue
            yield from self.each(body)

    def each(self, body: str) -> Iterator[ToolCall]:
        """Yield the calls of a text between the marks."""
        try:
            for value in values(body):
                for call in value if isinstance(value, list) else [value]:
                    yield as_call(self._named(call))
        except ValueError as error:
            yield not_a_call(error)

    def _named(self, value: Any) -> Any:
        if self.keyed and isinstance(value, dict) and len(value) == 1:
            ((name, arguments),) = value.items()
            return {"name": name, "arguments": arguments}
        return value


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Names, which the group `name` of `head` finds, each before the JSON object of its arguments; `id` finds its id."""

    head: re.Pattern[str]
    end: str = ""

    def __call__(self, text: str) -> Iterator[ToolCall]:
        for body, head in bodies(text, self.head, self.end):
            if body is None:
                yield not_closed(self.end)
            else:
                call = read(body.strip("` \t\r\n"), name=head["name"])
                yield replace(call, id=written_id(head.groupdict().get("id")))


def _llama3(text: str) -> Iterator[ToolCall]:
    calls = list(_anywhere(text)) or list(FUNCTION.parse(text))
    if not calls and _PYTHON_TAG in text:
        calls = [ToolCall(problem='a call must be {"name": ..., "parameters": {...}}')]
    yield from calls


def _mistral(text: str) -> Iterator[ToolCall]:
    bare = text.lstrip().startswith('[{"name"')  # text without special tokens
    for body, head in bodies(f"[TOOL_CALLS]{text}" if bare else text, _MISTRAL):
        calls = [read(body or "", name=head["name"])] if head["name"] else JsonCalls("").each(body or "")
        for call in calls:
            name = head["id"] or call.id
            yield replace(call, id=name if _MISTRAL_ID.fullmatch(name) else "")


def _gemma(text: str) -> Iterator[ToolCall]:
    for piece in text.split("<|tool_call>")[1:]:
        body, end, _ = piece.partition("<tool_call|>")
        name, brace, rest = body.partition("{")
        if not end:
            yield not_closed("<tool_call|>")
        elif not (name.startswith("call:") and NAME.fullmatch(name := name.removeprefix("call:").strip())):
            yield ToolCall(problem="a call must be call:name{...}")
        else:
            yield read(_json(brace + rest), name=name)


def _json(text: str) -> str:
    """Return an object of Gemma as JSON: its keys are bare, and its texts are between other quotes."""
    pieces = text.split(_QUOTE)
    pieces[0::2] = [_BARE_KEY.sub(r'\1"\2":', piece) for piece in pieces[0::2]]
    pieces[0::2] = [
        _BARE_WORD.sub(lambda found: found[1] + _WORDS[found[2]], piece) for piece in pieces[0::2]
    ]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return "".join(pieces)


def _anywhere(text: str) -> Iterator[ToolCall]:
    """Parse objects with a name and arguments, wherever in the turn and between whatever marks they stand."""
    decoder, end = json.JSONDecoder(), 0
    for head in _OBJECT.finditer(text):
        if head.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, head.start())
        except (ValueError, RecursionError) as error:
            if _KEYS.search(text, head.start()):
                yield not_a_call(error)
            return
        keys = {*value, *(value["function"] if isinstance(value.get("function"), dict) else ())}
        if keys & {"name", "tool_name", "function"} and not keys.isdisjoint(ARGUMENTS):
            yield read(text[head.start() : end])


def _between(begin: str, end: str, inside: str, *, keyed: bool = False) -> CallFormat:
    return CallFormat(
        JsonCalls(re.escape(begin), end, keyed), f"{begin}{inside}{end}", ends_calls=end, begins=(begin,)
    )


_CALL, _COHERE_CALL = '{"name": "f", "arguments": {"x": "1"}}', '{"tool_name": "f", "parameters": {"x": "1"}}'
HERMES = CallFormat(
    JsonCalls("<tool_call>", "</tool_call>"),
    f"<tool_call>{_CALL}</tool_call>",
    ends_call="</tool_call>",
    begins=("<tool_call>",),
)
LLAMA3 = CallFormat(_llama3, '{"name": "f", "parameters": {"x": "1"}}', begins=(_PYTHON_TAG, '{"name"', "{"))
MISTRAL = CallFormat(_mistral, f"[TOOL_CALLS][{_CALL}]", begins=("[TOOL_CALLS]", "[{"))
DEEPSEEK = CallFormat(
    NamedCalls(
        re.compile(
            r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]{1,200})\s*(?:<｜tool▁sep｜>|```(?:json)?)"
        ),
        "<｜tool▁call▁end｜>",
    ),
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "1"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ends_call="<｜tool▁call▁end｜>",
    ends_calls="<｜tool▁calls▁end｜>",
    begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
)
HARMONY = CallFormat(
    NamedCalls(
        re.compile(
            r"(?:<\|channel\|>\s*\w{1,20}|<\|start\|>assistant|\A)\s*\bto=(?:functions\.)?(?P<name>[^\W\d][\w.-]{0,199})"
            r"(?![\w.-])(?:[^\n{<]|<\|(?:channel|constrain)\|>){0,100}<\|message\|>"
        )
    ),
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "1"}<|call|>',
    ends_calls="<|call|>",
    begins=("<|channel|>commentary to=", " to=functions."),
)
KIMI = CallFormat(
    NamedCalls(
        re.compile(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<|]{1,200})(?::\w{1,20})?)"
            r"\s*<\|tool_call_argument_begin\|>"
        ),
        "<|tool_call_end|>",
    ),
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": "1"}<|tool_call_end|><|tool_calls_section_end|>',
    ends_call="<|tool_call_end|>",
    ends_calls="<|tool_calls_section_end|>",
    begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
)
SOLAR = CallFormat(
    NamedCalls(
        re.compile(
            r"<\|tool_call:begin\|>(?P<id>[^<]{0,200})<\|tool_call:name\|>\s*(?P<name>[^\s<]{1,200})\s*<\|tool_call:args\|>"
        ),
        "<|tool_call:end|>",
    ),
    '<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>f<|tool_call:args|>{"x": "1"}<|tool_call:end|><|calls|>',
    ends_call="<|tool_call:end|>",
    ends_calls="<|calls|>",
    begins=("<|tool_calls|>", "<|tool_call:begin|>"),
)
FUNCTIONARY = CallFormat(  # the generation prompt may have written >>>; the name `all` is for an answer
    NamedCalls(re.compile(r"(?:>>>|\A(?=[^\n]*\n\s*\{))(?!all\n)(?P<name>[^\W\d][\w.:/-]{0,199})\n")),
    '>>>f\n{"x": "1"}',
    begins=(">>>",),
)
GEMMA = CallFormat(
    _gemma,
    '<|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|>',
    ends_call="<tool_call|>",
    begins=("<|tool_call>",),
)
GRANITE = CallFormat(
    JsonCalls(r"<(\|?)tool_call\1>"), f"<|tool_call|>[{_CALL}]", begins=("<|tool_call|>", "[{")
)
GIGACHAT = CallFormat(
    JsonCalls(r"<\|function_call\|>|function call<\|role_sep\|>"),
    f"<|function_call|>{_CALL}",
    begins=("<|function_call|>", "function call<|role_sep|>"),
)
TOOL_CALLS = _between("<tool_calls>", "</tool_calls>", f"[{_CALL}]")
NEMOTRON = _between("<TOOLCALL>", "</TOOLCALL>", f"[{_CALL}]")
COHERE = _between("<|START_ACTION|>", "<|END_ACTION|>", f"[{_COHERE_CALL}]")
APERTUS = _between("<|tools_prefix|>", "<|tools_suffix|>", '[{"f": {"x": "1"}}]', keyed=True)
JSON = CallFormat(_anywhere, f"{_CALL}", begins=('{"name"', "{"))
