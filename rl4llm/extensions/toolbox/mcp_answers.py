"""What a tool of an MCP server answers, as text: resources are read, and what is not text is described."""

from __future__ import annotations

import base64
import binascii
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
    data = _decoded(getattr(part, "data", ""))
    return f"{part.type}{_in_brackets(getattr(part, 'mime_type', None), _size(len(data)))} that cannot be shown as text"


def _resource(resource: Any) -> str:
    """Return the address of a resource and its text, also if the server sent text as bytes; else describe it."""
    text = getattr(resource, "text", None)
    if text is None:
        data = _decoded(resource.blob)
        text = _read(data, resource.mime_type or "")
        if text is None:
            about = _in_brackets(resource.mime_type, _size(len(data)))
            return f"{resource.uri}{about}, which cannot be shown as text"
    return f"{resource.uri}:\n{text}"


def _read(data: bytes, mime_type: str) -> str | None:
    """Return the bytes of a textual mime type as text; None for others, and for bytes that are not UTF-8."""
    kind = mime_type.partition(";")[0].strip().lower()
    if not kind.startswith("text/") and not kind.endswith(TEXTUAL):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # the server's encoding is wrong; its size is all that is shown
        return data.encode()


def _size(count: int | None) -> str | None:
    return None if count is None else f"{count:,} bytes"


def _in_brackets(*facts: str | None) -> str:
    known = [fact for fact in facts if fact]
    return f" ({', '.join(known)})" if known else ""
