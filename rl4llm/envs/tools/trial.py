"""Call each tool with arguments made from its schema, to check that it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools.formats import ToolCall

_MAX_DEPTH = 8  # of a schema that refers to itself
_BY_TYPE: Mapping[str, Any] = {"string": "example", "integer": 1, "number": 1.0, "boolean": True}


async def tool_failures(env: ToolMDPEnv, sample: SampleState) -> list[str]:
    """Call each tool of an environment once, as the only call of an episode; return the failures.

    An answer and a ToolError are both accepted, since made-up arguments need not make sense.
    """
    failures = []
    for name, tool in env.tools.items():
        tried = SampleState(
            sample.prompt_id, sample.index, list(sample.messages), sample.ground_truth, sample.columns
        )
        tried.extras["metrics"] = {"tool_calls": 1, "tool_errors": 0}
        arguments = example({"type": "object", **tool.parameters}, tool.parameters)
        try:
            await env._answer(tried, ToolCall(name, arguments))
        finally:
            await env._end_safely(tried)
        if tried.failure is not None:
            failures.append(f"with {arguments!r:.200}: {tried.failure}")
    return failures


def example(schema: Any, root: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a value that fits a JSON schema; references are looked up in `root`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    values = [schema[key] for key in ("default", "const") if key in schema]
    values += [schema[key][0] for key in ("enum", "examples") if schema.get(key)]
    if values:
        return values[0]
    inner = [schema[key][0] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)]
    inner += [_found(schema["$ref"], root or {})] if "$ref" in schema else []
    return example(inner[0], root, depth + 1) if inner else _of_type(schema, root, depth)


def _of_type(schema: Mapping[str, Any], root: Mapping[str, Any] | None, depth: int) -> Any:
    listed = schema.get("type")
    kind = listed[0] if isinstance(listed, list) else listed
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items")] * max(1, schema.get("minItems", 1))
        return [example(item, root, depth + 1) for item in items]
    if kind == "object":
        inner = schema.get("properties") or {}
        return {name: example(inner.get(name), root, depth + 1) for name in schema.get("required") or ()}
    return (
        schema.get("minimum", _BY_TYPE.get(kind))
        if kind in ("integer", "number")
        else _BY_TYPE.get(str(kind))
    )


def _found(reference: Any, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in str(reference).removeprefix("#/").split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
