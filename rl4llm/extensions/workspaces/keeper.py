"""The keeper of a pool's workspaces: it starts their holders and gates, ends with the trainer, and leaves nothing."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl4llm.extensions.workspaces import namespaces, network
from rl4llm.extensions.workspaces.holder import Holder
from rl4llm.extensions.workspaces.network import Doors
from rl4llm.extensions.workspaces.orders import answer, receive
from rl4llm.runtime import processes

PARENT_CHECK_S = 1.0
LOCK = "lock"
_ROOT = str(Path(__file__).parents[3])


def main() -> None:
    """Open workspaces until the trainer ends, and remove everything, with the words behind the first two arguments."""
    parent, base, *words = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1)
    with open(os.open(f"{base}/{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600), closefd=False) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process and all holders have ended
    os.rename(f"{base}/{LOCK}.new", f"{base}/{LOCK}")
    control = socket.socket(fileno=0)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == int(parent):  # a fork of the trainer may keep the connection open
        if poll.poll(PARENT_CHECK_S * 1000) and not _open(control):
            break
        _reap()
    for pid in processes.descendants_of(os.getpid()):
        processes.kill(pid)
    while _reap():
        time.sleep(0.005)
    remove_all(base, words)


def program(module: str, *words: str) -> list[str]:
    """Return the words that run `main` of a module of this package in a separate process."""
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__package__} import {module}; {module}.main()"
    return [sys.executable, "-I", "-c", code, *words]


def remove_all(base: str, words: Sequence[str]) -> None:
    """Remove a keeper's containers with words, then its directory. If they fail it stays, for the next pool to try."""
    if not words or subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
        remove(base)


def remove(directory: str) -> None:
    """Remove a tree that may be deep, or without permissions."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(directory):
            subprocess.run(
                [*command, directory], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
            )


def _open(control: socket.socket) -> bool:
    """Start what an order names: the holder of a workspace, or the ports of a container; return whether there was one."""
    order, descriptors = receive(control)
    if not order:
        return False
    keeper, container = os.getpid(), order.get("container")
    doors = Doors(order["sockets"], order["network"], order["proxy"])
    gate, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if doors.ports and os.fork() == 0:
            for descriptor in (control.fileno(), inside.fileno(), *descriptors):
                os.close(descriptor)
            _be(lambda: doors.serve(gate), keeper)
        gate.close()
        if (os.fork() if container else namespaces.enter()) == 0:
            control.close()
            reply, connection = descriptors[0], socket.socket(fileno=descriptors[1])
            if container:
                _be(lambda: _listen(container, doors.ports, inside, reply, connection), keeper, reply)
            _be(lambda: Holder(order, connection, keeper, doors.ports, inside).serve(reply), 0, reply)
    except OSError as error:
        answer(descriptors[0], {"error": f"namespaces: {error}"})
    for descriptor in (inside.detach(), *descriptors):
        os.close(descriptor)
    return True


def _be(work: Callable[[], object], keeper: int, reply: int = -1) -> None:
    """Do work in this process, which ends after it, and with the keeper unless the work sees to that."""
    try:
        if keeper:
            namespaces.end_with_parent(keeper)
        work()
    except OSError as error:
        answer(reply, {"error": f"mount: {error}"})
    finally:
        os._exit(0)


def _listen(pid: int, ports: list[int], gate: socket.socket, reply: int, connection: socket.socket) -> None:
    """Listen in the network of a container, by its first process, until the connection ends."""
    namespaces.join_network(pid)
    network.listen(gate, ports)
    answer(reply, {})
    connection.recv(1)


def _reap() -> bool:
    """Reap children that ended; return whether there are others."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False
