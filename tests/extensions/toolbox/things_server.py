"""A real MCP server for the tests: python things_server.py [PORT]; without a port it talks over stdin and stdout."""

import asyncio
import base64
import logging
import os
import sys
from typing import Any

from mcp import MCPError, types
from mcp.server import MCPServer


def bytes_of(uri, mime_type, data):
    blob = base64.b64encode(data).decode()
    return types.EmbeddedResource(
        type="resource", resource=types.BlobResourceContents(uri=uri, mime_type=mime_type, blob=blob)
    )


NOTE = types.TextResourceContents(uri="memo://1", mime_type="text/plain", text="Buy tea.\nAnd [bread].")
LINK = {"type": "resource_link", "name": "report", "uri": "file:///r.pdf", "mime_type": "application/pdf"}
PARTS = {
    "text": [types.EmbeddedResource(type="resource", resource=NOTE)],
    "textual bytes": [bytes_of("memo://2", "application/ld+json; charset=utf-8", '{"é": 1}'.encode())],
    "bytes": [bytes_of("memo://3", "application/gzip", bytes(2000))],
    "false text": [bytes_of("memo://4", "text/plain", b"\xff\xfe")],
    "link": [types.ResourceLink(**LINK, size=12345, description="The report.")],
    "short link": [types.ResourceLink(type="resource_link", name="report", uri="file:///r.pdf")],
    "image": [types.ImageContent(type="image", data=base64.b64encode(bytes(70)).decode(), mime_type="image/png")],
    "sound": [types.AudioContent(type="audio", data=base64.b64encode(bytes(5)).decode(), mime_type="audio/wav")],
    "torn image": [types.ImageContent(type="image", data="abcde", mime_type="image/png")],
    "nothing": [types.TextContent(type="text", text="")],
}  # fmt: skip
parties = {}
server = MCPServer("things", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Never works."""
    raise ValueError("no luck")


@server.tool()
def refuse(code: int) -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code, "not like this")


@server.tool()
async def meet(party: str, count: int) -> str:
    """Wait until `count` calls have arrived."""
    await parties.setdefault(party, asyncio.Barrier(count)).wait()
    return "met"


@server.tool(structured_output=False)
def read(kind: str) -> list[Any]:
    """Answer with a text and a part of another kind."""
    return [types.TextContent(type="text", text="Here:"), *PARTS[kind]]


@server.tool()
def measure() -> dict[str, int]:
    """Answer with numbers."""
    return {"width": 3}


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
