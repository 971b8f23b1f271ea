"""Give arguments that were written as text the types that their tool's schema asks for."""

from __future__ import annotations

from typing import Any

from rl4llm.envs.tools.arguments import parts, unmet
from rl4llm.envs.tools.formats.calls import Written, checked, loaded
from rl4llm.envs.tools.formats.python import literal


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
    for read in (loaded, literal):
        try:
            checked("", {"": (value := read(text))})
        except (ValueError, SyntaxError):
            continue
        value = typed(value, schema)
        if not isinstance(value, str) and unmet(value, schema) is None:
            return value
    return text
