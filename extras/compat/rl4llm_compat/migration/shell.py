"""Words of a shell script: variables, arrays and quotes, but no branches, loops or programs."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

BRACED = r"(?:[^{}]|\{[^{}]*\})*"
VARIABLE = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)"
    rf"|\$\{{(?P<braced>\w+|[@*])(?:(?P<sign>:?[-=+?])(?P<default>{BRACED}))?\}}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[@*#?\d])"
)
TOKEN = re.compile(
    r"""(?P<array>"?\$\{\w+\[[@*]\]\}"?)|(?P<single>'[^']*')|(?P<double>"(?:\\.|[^"\\])*")|(?P<escaped>\\.)"""
    rf"""|(?P<space>\s+)|(?P<stop>[;|&<>]|(?<!\S)\#)|(?P<other>\$\(\(.*?\)\)|\$\{{{BRACED}\}}|\$[\w@*#?]+|.)""",
    re.DOTALL,
)
COMMENT = re.compile(r"(?:^|\s)#.*$")
ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
OPENS, CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def commands(text: str) -> list[list[str]]:
    """Return the words of each command outside of branches and loops, with variables replaced.

    What only a shell knows, such as ``$(hostname)``, stays as it is written. Variables of the environment become references
    of a configuration, ``${oc.env:NAME}``, since their values may be secret, and differ on other machines.
    """
    script = _ShellScript({name: f"${{oc.env:{name}}}" for name in os.environ})
    return [words for line in _lines(text) if (words := script.run(line))]


def _lines(text: str) -> Iterator[str]:
    """Yield commands: continued lines and arrays are joined, comments and what is in branches are left out."""
    text, depth, held = re.sub(r"[ \t]*\\\r?\n", " ", text), 0, ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        first = line.split(maxsplit=1)[0].rstrip(";")
        closing = re.split(r"[;\s]+", line)[-1]
        if not held and (first in OPENS or first in CLOSES):
            depth += (first in OPENS) - (first in CLOSES or closing in CLOSES)
            continue
        if depth:
            continue
        if held or re.match(r"(?:declare\s+-a\s+)?\w+\+?=\((?!\()", line):
            held += " " + COMMENT.sub("", line)
            if not held.endswith(")"):
                continue
            line, held = held.strip(), ""
        yield line


class _ShellScript:
    """The variables of a script."""

    def __init__(self, variables: dict[str, str]):
        self.variables = variables
        self.arrays: dict[str, list[str]] = {}

    def run(self, line: str) -> list[str]:
        """Return the words of a command; assignments have none."""
        found = ASSIGNMENT.fullmatch(line)
        if found and found[3].startswith("(") and line.endswith(")"):
            items = self.words(found[3][1:-1])
            self.arrays[found[1]] = [*self.arrays.get(found[1], []), *items] if found[2] else items
            return []
        words = self.words(line)
        while words and words[0] in ("export", "local", "readonly"):
            words = words[1:]
        rest = 0
        for word in words:
            if not (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)):
                break
            rest += 1
            if rest == len(words) or len(words) == 1:
                self.variables[match[1]] = match[2]
        return words[rest:]

    def words(self, text: str) -> list[str]:
        """Split a line into words, with quotes removed and variables replaced; a pipe or semicolon ends it."""
        words: list[str] = []
        word: str | None = None  # None between words
        for token in TOKEN.finditer(text):
            kind, part = token.lastgroup, token[0]
            if kind == "stop":
                break
            if kind == "space":
                words, word = words if word is None else [*words, word], None
            elif kind == "array" and word is None:
                words += self.arrays.get(re.findall(r"\w+", part)[0], [])
            elif kind == "single":
                word = (word or "") + part[1:-1]
            elif kind == "double":
                word = (word or "") + self.expand(part[1:-1]).replace('\\"', '"')
            elif kind == "escaped":
                word = (word or "") + part[1]
            else:
                value = self.expand(part)
                word = value or word if word is None else word + value
        return words if word is None else [*words, word]

    def expand(self, text: str) -> str:
        """Replace variables; an unknown one stays as it is written."""
        return VARIABLE.sub(self._of, text)

    def _of(self, found: re.Match[str]) -> str:
        if found["sum"]:
            return self._sum(found["sum"])
        name = found["braced"] or found["plain"]
        if name in ("@", "*"):
            return ""
        value, sign = self.variables.get(name, ""), found["sign"] or ""
        if sign.endswith("+"):
            return self.expand(found["default"]) if value else ""
        if not value and sign:
            return " ".join(self.words(found["default"]))
        return value if name in self.variables else found[0]

    def _sum(self, text: str) -> str:
        """Return the value of whole-number arithmetic, or the text if it is none."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self.variables.get(name[1], name[1]), text)
        try:
            return str(_value(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return f"$(({text}))"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not arithmetic")
