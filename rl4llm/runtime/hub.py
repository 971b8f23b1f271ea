"""Whether the Hugging Face Hub is reachable."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE_S = 5.0
ENDPOINT = "https://huggingface.co"
PORTS = {"http": 80, "https": 443}


def hub_answers() -> bool:
    """Return whether the hub's address accepts connections: `HF_ENDPOINT`, or the default one.

    Without a network the hub's own client tries each file five times, with a warning each, for half a minute, before it
    looks for a copy in its cache. Behind a proxy this returns True, since only the client can find out.
    """
    address = urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    if address.scheme in getproxies():
        return True
    return _listens(address.hostname or "", address.port or PORTS.get(address.scheme, 443))


@functools.cache
def _listens(host: str, port: int) -> bool:
    """Try to connect, once per process and address: a network that drops packets costs all of `PATIENCE_S`."""
    try:
        socket.create_connection((host, port), PATIENCE_S).close()
    except OSError:
        return False
    return True
