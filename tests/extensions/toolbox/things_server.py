"""A real MCP server for the tests: python things_server.py [PORT]; without a port it talks over stdin and stdout."""

import asyncio
import logging
import os
import sys

from mcp import MCPError
from mcp.server import MCPServer

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
