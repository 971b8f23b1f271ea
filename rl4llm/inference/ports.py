"""Ports for servers: a free one, who holds one, and which addresses only this machine reaches."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

import psutil

from rl4llm.core.errors import ConfigError, EngineError

BELOW_EPHEMERAL = range(20000, 32768)
"""Where free ports are looked for: servers' own child processes take theirs from 32768 on, while the server boots."""

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def free_port(host: str) -> int:
    """A port on `host` that nobody holds."""
    candidates = random.SystemRandom().sample(BELOW_EPHEMERAL, 100)
    for port in candidates:
        if _taken(host, port) is None:
            return port
    raise EngineError(f"None of 100 ports between 20000 and 32767 is free on {host}. Next: give one with --port.")


def check_free(host: str, port: int) -> None:
    """Raise EngineError when a server on `port` could not start, and say who is in its way."""
    problem = _taken(host, port)
    if problem is None:
        return
    if problem.errno == errno.EADDRINUSE:
        raise EngineError(
            f"Port {port} on {host} is taken by {describe(holder(port))}. Next: stop it, or give another --port (0 takes "
            "a free one)."
        )
    raise EngineError(f"No server can listen on port {port} of {host}: {problem.strerror}.")


def holder(port: int) -> int | None:
    """The process that listens on a port; None when nobody does, or this user may not see who."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    bound = [item for item in connections if item.laddr and item.laddr.port == port]
    listening = [item for item in bound if item.status == psutil.CONN_LISTEN]
    return next((item.pid for item in listening if item.pid is not None), None)


def describe(pid: int | None) -> str:
    """A process in words, without its options: there may be keys among them."""
    if pid is None:
        return "a process that this user may not see"
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return f"process {pid}"
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return f"process {pid} ({' '.join(words[:end])[:80]})"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for anything
        return False


def url_of(host: str, port: int) -> str:
    """Where a server that listens on `host` is asked from this machine.

    >>> url_of("0.0.0.0", 30000)
    'http://127.0.0.1:30000'
    """
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _taken(host: str, port: int) -> OSError | None:
    """Why nobody can listen on a port; None when it is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing are not in the way
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None
