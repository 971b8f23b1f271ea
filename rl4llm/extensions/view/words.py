"""What an episode said, in one line: its question, its answer, and what is odd about the answer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

LONGEST = 160  # characters of a line
SEEN = 4000  # characters of an answer that are searched for oddities
WORDS = 4  # of a phrase
REPEATED = 0.5  # of the phrases of an answer


def dicts_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list, none for anything else: a run's files may hold anything."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def lines_of(messages: Any, turns: Any) -> tuple[str, str, str]:
    """Return the beginning of the question, the beginning of the last answer, and what is odd about what was answered.

    The question is the last user message before the policy's first turn; a prompt may contain answers too.
    """
    rows = dicts_in(messages)
    places = [place for place, row in enumerate(rows) if row.get("role") == "assistant"]
    turns = min(turns, len(places)) if isinstance(turns, int) else 0
    begin = places[-turns] if turns > 0 else len(rows)
    questions = [row for row in rows[:begin] if row.get("role") == "user"] or rows[:1]
    answers = [_text(row) for row in rows[begin:] if row.get("role") == "assistant"]
    question = _line(_text(questions[-1])) if questions else ""
    return (question, _line(answers[-1]), odd("\n".join(answers))) if answers else (question, "", "")


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
    characters = {character for character in answer if not character.isascii()}
    if "\ufffd" in characters or {"Co", "Cn", "Cs"} & set(map(unicodedata.category, characters)):
        return "broken characters"
    words = answer.split()
    phrases = [*zip(*(words[start:] for start in range(WORDS)), strict=False)]
    if len(phrases) > WORDS and 1 - len(set(phrases)) / len(phrases) >= REPEATED:
        return "repeats itself"
    return ""


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    for call in dicts_in(message.get("tool_calls")):
        for function in dicts_in([call.get("function", call)]):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            texts.append(f"{function.get('name', '')} {text}")
    return "\n".join(texts).strip()


def _line(text: str) -> str:
    """Return the lines of a text as one, up to LONGEST characters; code fences and empty lines are left out."""
    lines = (" ".join(line[: 4 * LONGEST].split()) for line in text[: 8 * LONGEST].splitlines())
    line = " \u23ce ".join(line for line in lines if line and not line.startswith("```"))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}\u2026"
