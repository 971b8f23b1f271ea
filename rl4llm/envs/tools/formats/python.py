"""Calls in the manner of Python, with named arguments: f(x="1"), alone or in a list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl4llm.envs.tools.formats.calls import (
    MAX_DEPTH,
    CallFormat,
    ToolCall,
    check_length,
    checked,
    not_a_call,
    not_closed,
    space_end,
)
from rl4llm.envs.tools.formats.objects import JsonCalls

_WORDS: Mapping[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"""
    r"""|(?P<name>[^\W\d][\w.]*)|(?P<mark>[\[\](){}:,=])""",
    re.DOTALL,
)
_MARK = re.compile(r"```tool_code\s*\n|\A\s*```python\s*\n|<\|python_start\|>|<function_calls>")
_MARK_END = re.compile(r"```|<\|python_end\|>|</function_calls>")
_BEGINS = re.compile(r"\[?\s*[^\W\d][\w.]{0,199}\(")
_SPECIAL_TOKENS = re.compile(r"(?:\s*<[^<>\s]{1,60}>)*\s*")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls with named arguments, alone or in a list, or JSON, between two marks; with no marks, those of the whole turn."""

    begin: str = ""
    end: str = ""

    def __call__(self, text: str) -> Iterator[ToolCall]:
        if not self.begin:
            yield from self._whole(text.strip())
            return
        for piece in text.split(self.begin)[1:]:
            body, end, _ = piece.partition(self.end)
            yield from self._each(body) if end else [not_closed(self.end)]

    def _whole(self, text: str) -> Iterator[ToolCall]:
        mark = _MARK.search(text)
        if mark:
            text = _MARK_END.split(text[mark.end() :], maxsplit=1)[0].strip()
        if not _BEGINS.match(text):
            return
        end = 1 + text.rfind("]" if text[0] == "[" else ")")
        if _SPECIAL_TOKENS.fullmatch(text, end):
            yield from self._each(text[:end])
        elif text[0] == "[" or mark:
            yield ToolCall(problem=f"the call cannot be read: unexpected {text[end : end + 40]!r}")

    def _each(self, body: str) -> Iterator[ToolCall]:
        if body.lstrip("[ \t\r\n").startswith("{"):
            yield from JsonCalls("").each(body)
            return
        try:
            check_length(body)
            yield from _Reader(body).calls()
        except (ValueError, SyntaxError) as error:
            yield not_a_call(error)


def literal(text: str) -> Any:
    """Return the value of a literal of Python or JSON; raises ValueError or SyntaxError."""
    check_length(text)
    return _Reader(text).literal()


class _Reader:
    """Reads calls and literals of Python in one pass, without evaluating anything. Texts may hold line breaks."""

    def __init__(self, text: str):
        self._tokens = self._split(text)
        self._kind, self._token = next(self._tokens)

    def calls(self) -> list[ToolCall]:
        listed, calls = self._take("["), [self._call()]
        while self._kind != "end" and self._token != "]":
            self._take(",")
            calls.append(self._call())
        if listed:
            self._expect("]")
        self._next("end")
        return calls

    def literal(self) -> Any:
        value = self._value(MAX_DEPTH)
        self._next("end")
        return value

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while (at := space_end(text, at)) < len(text):
            match = _TOKEN.match(text, at)
            if not match:
                raise ValueError(f"unexpected {text[at : at + 40]!r}")
            yield str(match.lastgroup), match.group()
            at = match.end()
        while True:
            yield "end", ""

    def _next(self, kind: str = "") -> str:
        token = self._token
        if kind and self._kind != kind:
            raise ValueError(f"expected the {kind}, not {token[:40]!r}")
        self._kind, self._token = next(self._tokens)
        return token

    def _take(self, mark: str) -> bool:
        matches = self._kind == "mark" and self._token == mark
        if matches:
            self._next()
        return matches

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"expected {mark!r}, not {self._token[:40]!r}")

    def _call(self) -> ToolCall:
        name, arguments = self._next("name"), {}
        self._expect("(")
        while not self._take(")"):
            key = self._next("name")
            self._expect("=")
            if key in arguments:
                raise ValueError(f"the argument {key!r} is given twice")
            arguments[key] = self._value(MAX_DEPTH)
            if self._token != ")":
                self._expect(",")
        return checked(name, arguments)

    def _value(self, depth: int) -> Any:
        if not depth:
            raise ValueError("it is nested too deeply")
        for begin, end in ("[]", "()"):
            if self._take(begin):
                return [item for item, _ in self._items(end, depth)]
        if self._take("{"):
            return dict(self._items("}", depth))
        kind, token = self._kind, self._next()
        if kind == "text":
            return ast.literal_eval(token.replace("\n", "\\n").replace("\r", "\\r"))
        if kind == "number":
            return json.loads(token)
        if token not in _WORDS:
            raise ValueError(f"expected a value, not {token[:40]!r}")
        return _WORDS[token]

    def _items(self, end: str, depth: int) -> Iterator[tuple[Any, Any]]:
        while not self._take(end):
            item, value = self._value(depth - 1), None
            if end == "}":
                self._expect(":")
                value = self._value(depth - 1)
                if not isinstance(item, str):
                    raise ValueError(f"the key {item!r:.40} must be a text")
            yield item, value
            if self._token != end:
                self._expect(",")


LFM2 = CallFormat(
    PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    '<|tool_call_start|>[f(x="1")]<|tool_call_end|>',
    ends_calls="<|tool_call_end|>",
    begins=("<|tool_call_start|>",),
)
PYTHON = CallFormat(
    PythonCalls(),
    '[f(x="1")]',
    begins=("```tool_code", "```python", "<|python_start|>", "<function_calls>", "["),
)
