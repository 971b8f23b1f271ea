"""Separate a model's thoughts from its reply."""

from __future__ import annotations

import re

THOUGHT_ENDS = "</think>"
_MAX_QUOTED = 200
_QUOTE = re.compile(r"(?<!\\)(?:[\"`]|(?<!\w)'|'(?!\w))")


def after_thinking(text: str) -> str:
    """Return the reply after its thoughts: "" if it begins with a thought that never ends.

    Thoughts begin a reply, with ``<think>`` or, where the prompt opened them, without it. They end at the first
    ``</think>`` outside quotes. A mark that a program, an argument or a sentence quotes is text like any other.

    >>> after_thinking("<think>a</think> b"), after_thinking('say("</think>")'), after_thinking("<think>a")
    (' b', 'say("</think>")', '')
    """
    start = 0
    for _ in range(_MAX_QUOTED):
        found = text.find(THOUGHT_ENDS, start)
        if found < 0:
            break
        start = found + len(THOUGHT_ENDS)
        if not _quoted(text, found, start):
            return text[start:]
    return "" if text.lstrip().startswith("<think>") else text


def _quoted(text: str, start: int, end: int) -> bool:
    """Return whether a quotation that opened on the same line is still open at `start`, and ends after `end`."""
    line = text[max(text.rfind("\n", 0, start) + 1, start - 2000) : start]
    rest = text[end : end + 2000].partition("\n")[0]
    opened = ""
    for quote in _QUOTE.findall(line):
        opened = "" if quote == opened else opened or quote
    return bool(opened) and opened in rest
