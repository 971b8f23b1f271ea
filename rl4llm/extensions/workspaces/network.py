"""Ports of a workspace that lead outside: to addresses of the host, and to a proxy that knows a few names.

The network of a workspace is a separate loopback. Programs reach sockets that listen there, whose connections a process
with the trainer's user and network, the gate, continues on the host's side.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from rl4llm.extensions.workspaces.orders import receive_descriptors

PROXY_PORT = 3128
MOST_CONNECTIONS = 128
LONGEST_HEAD = 16 * 1024
CONNECT_S, HEAD_S = 10.0, 30.0
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
TUNNEL = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Doors:
    """The ports of one workspace, by what they lead to."""

    def __init__(self, sockets: Mapping[str, str], names: Sequence[str], proxy: int):
        self._targets: dict[int, str | frozenset[str]] = {
            int(port): target for port, target in sockets.items()
        }
        if names:
            self._targets[proxy] = frozenset(name.lower().rstrip(".") for name in names)
        self._listeners: list[socket.socket] = []
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    @property
    def ports(self) -> list[int]:
        return list(self._targets)

    def serve(self, holder: socket.socket) -> None:
        """Serve the listening sockets that the holder sends, one for each port, in place of those of the program before."""
        while True:
            word, descriptors = receive_descriptors(holder)
            self.close()
            if not word:
                return
            self._listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            for listener, target in zip(self._listeners, self._targets.values(), strict=True):
                threading.Thread(target=self._accept, args=(listener, target), daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        self._listeners = []

    def _accept(self, listener: socket.socket, target: str | frozenset[str]) -> None:
        with suppress(OSError):
            while True:
                inside, _ = listener.accept()
                self._places.acquire()
                threading.Thread(target=self._serve, args=(inside, target), daemon=True).start()

    def _serve(self, inside: socket.socket, target: str | frozenset[str]) -> None:
        try:
            with suppress(OSError, ValueError), inside:
                outside = connect(target) if isinstance(target, str) else through_proxy(inside, target)
                if outside is not None:
                    with outside:
                        pump(inside, outside)
        finally:
            self._places.release()


def listen(gate: socket.socket, ports: Sequence[int]) -> None:
    """Send the gate sockets that listen at ports of this network."""
    listeners = [socket.create_server(("127.0.0.1", port), backlog=64) for port in ports]
    if listeners:
        socket.send_fds(gate, [b"+"], [listener.fileno() for listener in listeners])


def connect(target: str) -> socket.socket:
    """Return a connection to a Unix socket's path, or to "127.0.0.1:PORT"."""
    if "/" not in target:
        host, _, port = target.rpartition(":")
        return socket.create_connection((host, int(port)), CONNECT_S)
    outside = socket.socket(socket.AF_UNIX)
    outside.settimeout(CONNECT_S)
    outside.connect(target)
    return outside


def pump(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes both ways until both sides have ended."""
    for side in (one, other):
        side.settimeout(None)
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def through_proxy(inside: socket.socket, names: frozenset[str]) -> socket.socket | None:
    """Answer the first request of a client of the proxy; return the connection that it asked for, or None."""
    inside.settimeout(HEAD_S)
    head, rest = _head(inside)
    method, target, version = head[0].split(" ")
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    port = url.port or 80
    secure = method == "CONNECT" and port == 443
    plain = method != "CONNECT" and url.scheme == "http" and port == 80
    host = url.hostname or ""
    address = public_address(host, port) if host in names and (secure or plain) else None
    if address is None:
        inside.sendall(FORBIDDEN)
        return None
    outside = socket.create_connection((address, port), CONNECT_S)
    if secure:
        inside.sendall(TUNNEL)
        outside.sendall(rest)
    else:
        path = url._replace(scheme="", netloc="").geturl() or "/"
        dropped = ("host:", "connection:", "proxy-")
        lines = [line for line in head[1:] if not line.lower().startswith(dropped)]
        lines = [f"{method} {path} {version}", f"Host: {host}", *lines, "Connection: close", "", ""]
        outside.sendall("\r\n".join(lines).encode("latin-1") + rest)
    return outside


def public_address(name: str, port: int) -> str | None:
    """Return an address of a name, or None if one of them is not public: a name may resolve to the machine itself."""
    resolved = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in resolved]
    return addresses[0] if all(ipaddress.ip_address(text).is_global for text in addresses) else None


def _head(client: socket.socket) -> tuple[list[str], bytes]:
    """Return the lines of a request's head, and what followed it. Raises ValueError for one that is too long."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(4096)
        if not piece or len(data) > LONGEST_HEAD:
            raise ValueError("not a request")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode("latin-1").split("\r\n"), rest


def proxy_environment(port: int) -> dict[str, str]:
    """Return the variables that announce the proxy to programs."""
    address = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    local = "127.0.0.1,localhost"
    return {**dict.fromkeys(names, address), "NO_PROXY": local, "no_proxy": local}
