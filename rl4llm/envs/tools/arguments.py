"""Whether a tool takes the arguments that a model gave, said in words that the model can learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4llm.envs.tools.tool import Tool

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def objection(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments by their names and outer types; None when nothing is."""
    properties = tool.parameters.get("properties") or {}
    unknown = [name for name in arguments if name not in properties]
    missing = [name for name in tool.parameters.get("required") or () if name not in arguments]
    if unknown or missing:
        what = f"no argument {unknown[0][:50]!r}" if unknown else f"the argument {missing[0]!r} is missing"
        return f"{tool.name}: {what}; arguments: {', '.join(properties) or 'none'}"
    for name, value in arguments.items():
        expected = properties[name].get("type")
        if not _is(value, expected) and not (value is None and properties[name].get("nullable")):
            return f"{tool.name}: the argument {name!r} must be of type {expected}, not {value!r:.50}"
    return None


def _is(value: Any, expected: Any) -> bool:
    if not isinstance(expected, str) or expected not in _TYPES:
        return True
    return isinstance(value, _TYPES[expected]) and (expected == "boolean" or not isinstance(value, bool))
