"""Tools in words, for chat templates that do not show their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TOOLS = "You can call these tools, which are described by JSON schemas:"
_CALLS = (
    "To call a tool, write its name and arguments. For example, a call of a tool f with the argument x is:"
)
_ANSWERS = "The answer of the tool is in the next message."


def description(schemas: Sequence[str], example: str) -> str:
    """Return a text that tells which tools there are and how a call is written."""
    return "\n".join([_TOOLS, *schemas, _CALLS, example, _ANSWERS])


def with_description(rows: list[dict[str, Any]], text: str, *, in_system: bool) -> list[dict[str, Any]]:
    """Return rows of messages with a text at the end of the system prompt, or before the first message."""
    first, *rest = rows
    if not in_system:
        return [first | {"content": f"{text}\n\n{first['content']}"}, *rest]
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *rows]
