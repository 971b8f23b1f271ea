"""What an episode said, in one line: its question, its answer, and what is odd about the answer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 160  # characters of a line
SEEN = 4000  # characters of an answer that are searched for oddities
WORDS = 4  # of a phrase
REPEATED = 0.5  # of the phrases of an answer


def dicts_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list, none for anything else: a run's files may hold anything."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def lines_of(messages: Any, turns: Any) -> tuple[str, str, str]:
    """Return the beginning of the question, the beginning of the last answer, and what is odd about what was answered.

    The question is the last user message before the policy's first turn; a prompt may contain answers too.
    """
    found = dicts_in(messages)
    answers = [at for at, one in enumerate(found) if one.get("role") == "assistant"]
    first = (
        answers[-min(turns, len(answers))] if answers and isinstance(turns, int) and turns > 0 else len(found)
    )
    asked = [one for one in found[:first] if one.get("role") == "user"] or found[:1]
    own = [one for one in found[first:] if one.get("role") == "assistant"]
    question = _text(asked[-1]) if asked else ""
    answer = _text(own[-1]) if own else ""
    return _line(question), _line(answer), odd("\n".join(map(_text, own))) if own else ""


def odd(answer: str) -> str:
    """Return in words what is odd about an answer, or nothing.

    >>> odd("42 42 42 42 42 42 42 42 42 42")
    'repeats itself'
    >>> odd("It is 42.")
    ''
    """
    answer = answer[:SEEN]
    if not answer.strip():
        return "empty"
    strange = (character for character in answer if not character.isascii())
    if any(
        character == "\ufffd" or unicodedata.category(character) in ("Co", "Cn", "Cs")
        for character in strange
    ):
        return "broken characters"
    words = answer.split()
    phrases = [*zip(*(words[start:] for start in range(WORDS)), strict=False)]
    if len(phrases) > WORDS and 1 - len(set(phrases)) / len(phrases) >= REPEATED:
        return "repeats itself"
    return ""


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return "\n".join(
        [content if isinstance(content, str) else "", *_calls(message.get("tool_calls"))]
    ).strip()


def _calls(calls: Any) -> Iterator[str]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping):
            given = function.get("arguments")
            yield f"{function.get('name', '')} {given if isinstance(given, str) else json.dumps(given)}"


def _line(text: str) -> str:
    """Return the lines of a text as one, up to LONGEST characters; code fences and empty lines are left out."""
    lines = (" ".join(line[: 4 * LONGEST].split()) for line in text[: 8 * LONGEST].splitlines())
    line = " \u23ce ".join(line for line in lines if line and not line.startswith("```"))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}\u2026"
