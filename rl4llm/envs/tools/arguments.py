"""Check the arguments of a tool call, with errors that the model can learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl4llm.envs.tools.tool import Tool

Schema = Mapping[str, Any]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def objection(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the names, types and choices of arguments; None if nothing is wrong."""
    schema = tool.parameters
    properties = schema.get("properties") or {}
    # a schema that names its arguments allows others only if it says so: most tools would drop them in silence
    additional = schema.get("additionalProperties", "properties" not in schema)
    closed = additional is False and "patternProperties" not in schema
    unknown = [name for name in arguments if closed and name not in properties]
    missing = [name for name in schema.get("required") or () if name not in arguments]
    if unknown or missing:
        what = f"no argument {unknown[0][:50]!r}" if unknown else f"the argument {missing[0]!r} is missing"
        return f"{tool.name}: {what}; arguments: {', '.join(properties) or 'none'}"
    for name, value in arguments.items():
        fault = unmet(value, properties.get(name, additional))
        if fault is not None:
            inside = "" if fault.value is value else f" holds {fault.value!r:.50}, which"
            actual = f", not {value!r:.50}" if fault.value is value else ""
            return f"{tool.name}: the argument {name!r}{inside} must be {fault.expected}{actual}"
    return None


class _Unmet(NamedTuple):
    """A value, and the requirement that it does not meet."""

    value: Any
    expected: str


def unmet(value: Any, schema: Any) -> _Unmet | None:
    """Return what is wrong with a value or a part of it; the tool checks what else its schema requires."""
    if isinstance(schema, Mapping) and value is None and schema.get("nullable"):
        return None
    expected = _not_json(value) or (_unmet_alone(value, schema) if isinstance(schema, Mapping) else None)
    if expected is not None:
        return _Unmet(value, expected)
    return next(filter(None, (unmet(item, inner) for item, inner in parts(value, schema))), None)


def _not_json(value: Any) -> str | None:
    """Return what a value must be if Python reads it but JSON does not allow it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, str) and value.encode(errors="replace") != value.encode(errors="surrogatepass"):
        return "valid Unicode"
    return None


def _unmet_alone(value: Any, schema: Schema) -> str | None:
    """Return what the value itself must be, regardless of its parts."""
    types, choices, either = schema.get("type"), schema.get("enum"), schema.get("anyOf")
    listed = types if isinstance(types, list) else [types]
    if not any(_is(value, each) for each in listed):
        return f"of type {' or '.join(map(str, listed))}"
    if isinstance(choices, list) and value not in choices:
        return f"one of {', '.join(map(repr, choices))}"[:200]
    failed = [unmet(value, each) for each in either] if isinstance(either, list) else []
    if failed and None not in failed:
        return " or ".join(dict.fromkeys(each.expected for each in failed if each))
    missing = (
        [name for name in schema.get("required") or () if name not in value]
        if isinstance(value, dict)
        else []
    )
    return f"an object with {missing[0]!r}" if missing else None


def parts(value: Any, schema: Any) -> list[tuple[Any, Any]]:
    """Return the items of an array or the members of an object, each with its schema."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        prefix = schema.get("prefixItems") or []
        return [(item, prefix[i] if i < len(prefix) else schema.get("items")) for i, item in enumerate(value)]
    if isinstance(value, dict):
        properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
        return [(item, properties.get(name, additional)) for name, item in value.items()]
    return []


def _is(value: Any, expected: Any) -> bool:
    """Return whether a value has a type of JSON Schema; an unknown type accepts all."""
    if not isinstance(expected, str) or expected not in _TYPES:
        return True
    return isinstance(value, _TYPES[expected]) and (expected == "boolean" or not isinstance(value, bool))
