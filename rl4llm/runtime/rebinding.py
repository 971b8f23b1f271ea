"""Keep websites out of servers without a key.

A website can have its name resolve to this machine (DNS rebinding). Its pages then reach servers here as their own, and
their requests have that name as Host. They cannot have an address, or the name of this machine.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

ADDRESS = re.compile(r"(localhost|\d+\.\d+\.\d+\.\d+|\[[\da-f:.]+\])(:\d+)?", re.ASCII | re.IGNORECASE)


@web.middleware
async def no_websites(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests whose Host is neither an IP address nor a name of this machine."""
    host = request.headers.get("Host", "")
    if not ADDRESS.fullmatch(host) and host.partition(":")[0].lower() != socket.gethostname().lower():
        raise web.HTTPForbidden(
            text=f"Host {host!r:.100} is not accepted, since a website's name may resolve to this machine. Use its address "
            "or localhost; only servers that need a key accept other names."
        )
    return await handler(request)
