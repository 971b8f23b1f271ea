"""Ports of servers: find a free one, find the process on one, and tell local addresses from others."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

import psutil

from rl4llm.core.errors import ConfigError, EngineError

BELOW_EPHEMERAL = range(20000, 32768)
"""The range of free ports to choose from: child processes of a server take ports from 32768 on, while it boots."""

KEY_VARIABLE = "RL4LLM_SERVER_KEY"
"""The environment variable with the key that servers require from other machines, and that clients send."""

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def free_port(host: str, but: int | None = None) -> int:
    """Return a free port on `host`, below the ephemeral ports and not `but`; raise EngineError if none is found."""
    candidates = random.SystemRandom().sample(BELOW_EPHEMERAL, 100)
    for port in candidates:
        if port != but and _taken(host, port) is None:
            return port
    raise EngineError(f"None of 100 ports is free on {host}. Next: set one with --port.")


def check_free(host: str, port: int) -> None:
    """Raise EngineError, with the process that uses it, if a server could not listen on `port`."""
    problem = _taken(host, port)
    if problem is None:
        return
    if problem.errno == errno.EADDRINUSE:
        raise EngineError(
            f"Port {port} on {host} is in use by {describe(holder(port))}. Set another --port, or 0."
        )
    raise EngineError(f"No server can listen on port {port} of {host}: {problem.strerror}.")


def holder(port: int) -> int | None:
    """Return the id of the process that listens on a port; None if there is none, or this user may not see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    bound = [item for item in connections if item.laddr and item.laddr.port == port]
    listening = [item for item in bound if item.status == psutil.CONN_LISTEN]
    return next((item.pid for item in listening if item.pid is not None), None)


def describe(pid: int | None) -> str:
    """Describe a process without its options, since they may contain keys."""
    if pid is None:
        return "a process that this user may not see"
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return f"process {pid}"
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return f"process {pid} ({' '.join(words[:end])[:80]})"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which may resolve to anything
        return False


def url_of(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server that listens on `host`.

    >>> url_of("0.0.0.0", 30000)
    'http://127.0.0.1:30000'
    """
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _taken(host: str, port: int) -> OSError | None:
    """Return the error of listening on a port; None if it is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    with socket.socket(family, kind, protocol) as probe:
        # So that connections that are closing do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None
