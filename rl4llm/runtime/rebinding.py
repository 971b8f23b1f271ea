"""Keep websites out of servers without a key.

A website can have its name resolve to this machine (DNS rebinding). Its pages then reach servers here as their own, and
their requests have that name as Host. They cannot have an address, or the name of this machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

HOST = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d+)?", re.ASCII)


@web.middleware
async def no_websites(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests whose Host is neither an IP address nor a name of this machine."""
    host = request.headers.get("Host", "")
    if not _is_address(host):
        raise web.HTTPForbidden(
            text=f"Host {host!r:.100} is not accepted, since a website's name may resolve to this machine. Use its address "
            "or localhost; only servers that need a key accept other names."
        )
    return await handler(request)


def _is_address(host: str) -> bool:
    parts = HOST.fullmatch(host)
    name = (parts[1] or parts[2] or "") if parts else ""
    try:
        return name.lower() in ("localhost", socket.gethostname().lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
