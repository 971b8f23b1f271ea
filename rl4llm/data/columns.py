"""Columns of a row beside its messages that decide what the policy reads: schemas of tools, template variables, pictures."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.message import IMAGE_FILES, is_encoded, is_media, read_arguments, read_json

TOOLS, FUNCTIONS, TEMPLATE_ARGS = "tools", "functions", "chat_template_kwargs"
IMAGES = ("image", "images", "image_url")
_PARAMETERS = ("input_schema", "inputSchema")  # what Anthropic and MCP call them
_LIST = re.compile(r"\s*\[\s*\{.*\}\s*\]\s*", re.DOTALL)
# an array without its commas
_PRINTED = re.compile(r"""\}\s*\n\s*\{\s*(["'])(role|from|content|value)\1\s*:""")
# of image files
_BEGINNINGS = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL)
_BASE64_BEGINNINGS = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_OF_SCHEMAS = frozenset(("type", "properties", "$ref", "anyOf", "oneOf", "allOf", "$defs", "required"))


def shown_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row with tools and template variables as chat templates take them, if they say anything.

    Raises DataError for schemas that cannot be read.
    """
    columns: dict[str, Any] = {}
    if row.get(TOOLS):
        columns[TOOLS] = read_tools(row[TOOLS])
    if row.get(TEMPLATE_ARGS):
        columns[TEMPLATE_ARGS] = read_arguments(row[TEMPLATE_ARGS], TEMPLATE_ARGS)
    return columns


def picture_columns(row: Mapping[str, Any], directory: Path) -> list[str]:
    """Return the columns with pictures, which their values tell; without such values, those whose names do.

    Beside pictures in `IMAGES`, those in other columns belong to the environment and the rewards. A text is a picture if it
    is a data URI, long base64 of an image's bytes, or the path of an image below `directory`.
    """
    pictures = [name for name, value in row.items() if _is_picture(value, directory)]
    named = [name for name in pictures if name in IMAGES]
    return named or pictures or [name for name in IMAGES if name in row and is_media(row[name])]


def _is_picture(value: Any, directory: Path) -> bool:
    if isinstance(value, str):
        if value.startswith(_BASE64_BEGINNINGS):
            return value.startswith("data:") or is_encoded(value)
        return value[-5:].lower().endswith(IMAGE_FILES) and os.path.isfile(directory / value)  # never raises
    if isinstance(value, bytes | bytearray | memoryview):
        return _BEGINNINGS.match(value) is not None
    if isinstance(value, list | tuple):
        return any(_is_picture(item, directory) for item in value[:64])
    if isinstance(value, Mapping):
        stored = (value.get(key) for key in ("bytes", "url", "image", "image_url"))
        path = value["path"] if {*value} == {"bytes", "path"} else None
        return any(_is_picture(item, directory) for item in stored) or str(path).lower().endswith(IMAGE_FILES)
    return hasattr(value, "save") and hasattr(value, "mode")  # an image of Pillow


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a row has a column; a dot leads into a nested one, such as ``reward_model.ground_truth``."""
    if column in row:
        return True
    name, _, rest = column.partition(".")
    return bool(rest) and isinstance(row.get(name), Mapping) and has_column(row[name], rest)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column that the row has, see `has_column`."""
    if column in row:
        return row[column]
    name, _, rest = column.partition(".")
    return value_at(row[name], rest)


def columns_key(row: Mapping[str, Any], own: Sequence[str]) -> str:
    """Return the tools and template variables of a row as JSON text; "" if it has none.

    Raises DataError for a row with tools if prompts show tools of the environment, whose names are `own`.
    """
    tools, args = row.get(TOOLS), row.get(TEMPLATE_ARGS)
    if tools and own:
        raise DataError(
            f"the row has tools in its column {TOOLS!r}, but prompts show others: {', '.join(own)}."
        )
    return json.dumps([tools, args], default=str) if tools or args else ""


def messages_in(stored: Any, column: str, *, only: bool = False) -> Any:
    """Return the messages in a text, which JSON or Python wrote; anything else stays as it is.

    Where the text can be nothing else, so `only` messages, any list in it is returned.

    Raises DataError, with the `column`, for a text that is neither but looks like messages, such as a printed array.
    """
    if not isinstance(stored, str) or not (only or _LIST.fullmatch(stored)):
        return stored
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(stored.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list) and (only or all(map(_says, value))) else stored
    if not _PRINTED.search(stored):
        return stored
    raise DataError(f"{column}: {stored!r:.60} looks like messages, but is not JSON. Write it as JSON.")


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the schemas of tools in the form of OpenAI, from a list or its JSON text; functions may be bare.

    Raises DataError for anything else.
    """
    tools = read_json(value, TOOLS) if isinstance(value, str) else value
    return [_schema(tool) for tool in ([tools] if isinstance(tools, Mapping) else tools)]


def _schema(tool: Any) -> dict[str, Any]:
    tool = read_arguments(tool, TOOLS)
    whole = tool.get("function") is not None
    function = read_arguments(tool["function"], "tools: function") if whole else dict(tool)
    if not isinstance(function.get("name"), str):
        raise DataError(
            f"the column {TOOLS!r} is not a list of schemas: {tool!r:.100}. Accepted: functions {{'name': ..., "
            "'parameters': ...}, bare or within {'type': 'function', 'function': ...}."
        )
    kind = {"type": "function"} if whole else {"type": function.pop("type", "function")}
    if (named := next((key for key in _PARAMETERS if key in function), None)) and not function.get(
        "parameters"
    ):
        function["parameters"] = function.pop(named)
    if function.get("parameters") is not None:
        function["parameters"] = _parameters(function["parameters"], function["name"])
    rest = {key: item for key, item in tool.items() if key != "function"} if whole else {}
    return {**kind, **rest, "function": function}


def _parameters(value: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters; some data sets store only its properties."""
    where = f"tools: the parameters of {name!r}"
    parameters = read_arguments(value, where)
    bare = parameters and all(isinstance(item, Mapping) for item in parameters.values())
    if bare and not (_OF_SCHEMAS & parameters.keys() and "type" not in parameters.get("type", {})):
        return {"type": "object", "properties": parameters}
    if parameters.get("properties") is not None:
        properties = read_arguments(parameters["properties"], f"{where}: properties")
        parameters["properties"] = {  # of which columns of one type store each as JSON text
            key: read_arguments(item) if isinstance(item, str) and item.lstrip().startswith("{") else item
            for key, item in properties.items()
        }
    return parameters


def without_nulls(value: Any) -> Any:
    """Return data without the keys that Arrow filled with null, since all objects of a column have the same keys there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return type(value)(without_nulls(item) for item in value)
    return value


def arrow_row(row: Any) -> Any:
    """Return a row of an Arrow table whose messages, schemas and template variables have no nulls.

    Other columns stay as they are: rewards get what is stored.
    """
    if not isinstance(row, Mapping):
        return row
    return {
        key: without_nulls(value) if key in (TOOLS, FUNCTIONS, TEMPLATE_ARGS) else _of_messages(value)
        for key, value in row.items()
    }


def _of_messages(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _of_messages(item) for key, item in value.items()}
    if not isinstance(value, list | tuple) or not value:
        return value
    messages = all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)
    return without_nulls(value) if messages else value


def _says(item: Any) -> bool:
    """Return whether an item of a text is a message: it names who speaks and has what they say."""
    parts = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return isinstance(item, Mapping) and any(part <= item.keys() for part in parts)
