"""Calls in the manner of XML, with a tag for each argument."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl4llm.envs.tools.formats.calls import (
    MAX_DEPTH,
    NAME,
    CallFormat,
    ToolCall,
    Written,
    check_length,
    checked,
    loaded,
    not_a_call,
    not_closed,
    read,
    space_end,
)

_CDATA = "<![CDATA["
_SEPARATOR = r"\]<\]minimax\[>\["


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    r"""Calls with tags around them and around each argument.

    `call` and `argument` match what begins them, with the groups `name` and `key`; what ends them may refer to groups, as in
    ``</\g<tag>>``. A group `type` of an argument tells whether its value is text or JSON. One JSON object may stand for all
    arguments. With `nested`, a value may consist of further arguments; those with the key `item` make a list.
    """

    call: re.Pattern[str]
    call_end: str
    argument: re.Pattern[str]
    argument_end: str
    nested: bool = False

    def __call__(self, text: str) -> Iterator[ToolCall]:
        at = 0
        while head := self.call.search(text, at):
            end = head.expand(self.call_end)
            place = text.find(end, head.end())
            if place < 0:
                yield not_closed(end)
                return
            yield self._one(head["name"], text[head.end() : place])
            at = place + len(end)

    def _one(self, name: str, body: str) -> ToolCall:
        try:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name[:50]!r} is not the name of a tool")
            check_length(body)
            if body.startswith("{", space_end(body, 0)):
                return read(body, name=name)
            return checked(name, self._unique(self._arguments(body, MAX_DEPTH)))
        except ValueError as error:
            return not_a_call(error)

    def _unique(self, pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for key, value in pairs:
            if key in arguments:
                raise ValueError(f"the argument {key!r} is given twice")
            arguments[key] = value
        return arguments

    def _arguments(self, body: str, depth: int) -> Iterator[tuple[str, Any]]:
        at = 0
        while (at := space_end(body, at)) < len(body):
            head = self.argument.match(body, at)
            if not head:
                raise ValueError(f"unexpected {body[at : at + 40]!r}")
            end = head.expand(self.argument_end)
            quoted = body.startswith(_CDATA, head.end())
            start = head.end() + len(_CDATA) * quoted
            close = f"]]>{end}" if quoted else end
            place = body.find(close, start)
            following = None if quoted or self.nested else self.argument.search(body, start)
            if following and (place < 0 or following.start() < place):  # the mark that ends it is missing
                place, close = following.start(), ""
            if place < 0:
                raise ValueError(f"the argument {head['key']!r} is not closed by {end}")
            yield head["key"], self._value(head.groupdict().get("type"), body[start:place], depth)
            at = place + len(close)

    def _value(self, kind: str | None, text: str, depth: int) -> Any:
        if kind:
            return text if kind in ("true", "string") else loaded(text)
        if self.nested and depth and self.argument.match(text):
            pairs = list(self._arguments(text, depth - 1))
            listed = all(key == "item" for key, _ in pairs)
            return [value for _, value in pairs] if listed else self._unique(iter(pairs))
        padded = len(text) > 1 and text[0] == text[-1] == "\n"
        return Written(text[1:-1] if padded else text)


FUNCTION = CallFormat(
    TaggedCalls(
        re.compile(r"<function=(?P<name>[^\s<>]{1,200})>"),
        "</function>",
        re.compile(r"<parameter=(?P<key>[^\s<>]{1,200})>"),
        "</parameter>",
    ),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    ends_call="</function>",
    begins=("<tool_call>\n<function=", "<function="),
)
INVOKE = CallFormat(
    TaggedCalls(
        re.compile(
            r'<(?P<tag>[^\s<>"=/]{0,30}(?:invoke|function)) name="(?P<name>[^"<>]{1,200})"[^<>]{0,100}>'
        ),
        r"</\g<tag>>",
        re.compile(
            r'<(?P<tag>[^\s<>"=/]{0,30}param(?:eter)?) name="(?P<key>[^"<>]{1,200})"'
            r'(?: (?:string|type)="(?P<type>[^"<>]{0,40})")?>'
        ),
        r"</\g<tag>>",
    ),
    '<invoke name="f"><parameter name="x">1</parameter></invoke>',
    begins=(
        *("<minimax:tool_call>", "<atem:function_calls>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        *("<invoke name=", "<function name="),
    ),
)
GLM = CallFormat(
    TaggedCalls(
        re.compile(r"<tool_call(?P<tag>:\w{1,40}|)>\s*(?P<name>[^\s<>]{0,200})(?:<tool_sep[:\w]{0,40}>)?"),
        r"</tool_call\g<tag>>",
        re.compile(
            r"<arg_key(?P<tag>:\w{1,40}|)>\s*(?P<key>[^\s<>](?:[^<>]{0,198}[^\s<>])?)\s*</arg_key[:\w]{0,40}>"
            r"\s*<arg_value[:\w]{0,40}>"
        ),
        r"</arg_value\g<tag>>",
    ),
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ends_call="</tool_call>",
    begins=("<tool_call>", "<tool_calls:", "<tool_call:"),
)
KIMI_K3 = CallFormat(
    TaggedCalls(
        re.compile(r'<\|open\|>call tool="(?P<name>[^"<>]{1,200})"[^<>]{0,100}<\|sep\|>'),
        "<|close|>call<|sep|>",
        re.compile(
            r'<\|open\|>argument key="(?P<key>[^"<>]{1,200})"(?: type="(?P<type>[^"<>]{0,40})")?<\|sep\|>'
        ),
        "<|close|>argument<|sep|>",
    ),
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    begins=("<|open|>tools<|sep|>", "<|open|>call "),
)
MINIMAX_M3 = CallFormat(
    TaggedCalls(
        re.compile(rf'{_SEPARATOR}<invoke name="(?P<name>[^"<>]{{1,200}})">'),
        "]<]minimax[>[</invoke>",
        re.compile(rf"{_SEPARATOR}<(?P<key>[^<>/]{{1,200}})>"),
        r"]<]minimax[>[</\g<key>>",
        nested=True,
    ),
    ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</invoke>\n'
    "]<]minimax[>[</tool_call>",
    begins=("]<]minimax[>[<tool_call>",),
)
