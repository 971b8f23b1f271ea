"""What a tool of an MCP server answers, as text: resources are read, and what is not text is described."""

from __future__ import annotations

import base64
import json
from typing import Any

TEXTUAL = ("json", "xml", "yaml", "toml", "javascript", "csv")
"""Ends of mime types besides text/... whose bytes are text, such as application/ld+json."""


def text_of(result: Any) -> str:
    """Return the parts of an answer as text, joined by newlines; its structured content if there is no part."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return _resource(part.resource)
    if part.type == "resource_link":
        about = f"link to {part.uri}{_in_brackets(part.title or part.name, part.mime_type, _size(part.size))}"
        return f"{about}: {part.description}" if part.description else about
    size = _size(len(_decoded(part.data)))
    return f"{part.type}{_in_brackets(part.mime_type, size)} that cannot be shown as text"


def _resource(resource: Any) -> str:
    """Return the address of a resource and its text, also if the server sent text as bytes; else describe it."""
    if hasattr(resource, "text"):
        return f"{resource.uri}:\n{resource.text}"
    data, kind = _decoded(resource.blob), (resource.mime_type or "").partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind.endswith(TEXTUAL):
        return f"{resource.uri}:\n{data.decode(errors='replace')}"
    facts = _in_brackets(resource.mime_type, _size(len(data)))
    return f"{resource.uri}{facts}, which cannot be shown as text"


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data)
    except ValueError:  # the server encoded it wrongly
        return data.encode()


def _size(count: int | None) -> str | None:
    return None if count is None else f"{count:,} bytes"


def _in_brackets(*facts: str | None) -> str:
    text = ", ".join(filter(None, facts))
    return f" ({text})" if text else ""
