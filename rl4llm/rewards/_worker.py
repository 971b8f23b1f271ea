"""The body of the processes of verifiers: one loads the verifier and forks the others, which answer tasks.

A task is one line, and so is its answer; no process outlives its parent by much. `rl4llm.rewards.fork_server` runs this
file by path, so that nothing of the trainer (torch above all) is imported here. It is also why Python must be started with
``-P``: the directory of this file holds a `math.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARENT_CHECK_S = 1.0
GRACE_S = 1.0
MAX_TASKS = 5000


def main() -> None:
    """Load the verifier, then fork workers until the parent is gone."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    for kind in (signal.SIGALRM, signal.SIGIO):
        signal.signal(kind, signal.SIG_DFL)
    _end_with(settings["lifeline"])
    _limit(resource.RLIMIT_AS, settings["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    sys.path[:] = settings["path"]
    function = _load(settings["entry"])
    for arguments in settings["warm_up"]:
        function(*arguments)
    gc.freeze()  # a collection in a worker would copy the pages that it shares
    server = os.getpid()
    if (channel := _breed(control, settings["parent"])) is not None:
        control.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # what libraries printed so far tells the parent why a start failed
            os.dup2(nowhere, descriptor)
        _send(channel, {"ready": os.getpid()})
        _serve(channel, function, {**settings, "parent": server})
        os._exit(0)


def _breed(control: socket.socket, parent: int) -> int | None:
    """Fork a worker for each order `n`, which comes with its socket; kill and reap worker `n` for each order `-n`.

    Return the socket in each worker, and None once the parent is gone.
    """
    pids: dict[int, int] = {}
    while _readable(control.fileno(), parent):
        order, channels, _, _ = socket.recv_fds(control, 4, 1)
        if not order:
            break
        (number,) = struct.unpack("i", order)
        if channels:
            with contextlib.suppress(OSError):  # then the parent sees that the socket is closed
                if (pid := os.fork()) == 0:
                    return channels[0]
                pids[number] = pid
            os.close(channels[0])
        else:
            control.sendall(struct.pack("2id", number, *_end(pids.pop(-number, None))))
    return None


def _end(pid: int | None) -> tuple[int, float]:
    """Kill and reap a child; return its wait status and its processor seconds, zeros where it could not be forked."""
    if pid is None:
        return 0, 0.0
    os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return status, used.ru_utime + used.ru_stime


def _end_with(lifeline: int) -> None:
    """End this process and those that it forks when the parent ends: only then does something happen to that socket.

    The sockets of tasks are no such sign: the event of a task may come later than the task itself. The signal has its
    default action, which the kernel carries out even in the middle of a C call that holds the interpreter.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit(kind: int, value: int) -> None:
    # macOS knows the address-space limit but refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


def _load(entry: str) -> Callable[..., Any]:
    """Import the function behind ``package.module:function`` or ``/path/to/file.py:function``."""
    module_name, _, attribute = entry.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), attribute)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None and spec.loader is not None  # there is one for whatever ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _serve(channel: int, function: Callable[..., Any], settings: dict[str, Any]) -> None:
    buffer = b""
    served = 0
    while True:
        while b"\n" not in buffer:
            chunk = b""  # so it stays once the trainer or the parent is gone
            if _readable(channel, settings["parent"]):
                with contextlib.suppress(ConnectionError):
                    chunk = os.read(channel, 65536)
            if not chunk:
                return
            buffer += chunk
        line, _, buffer = buffer.partition(b"\n")
        served += 1
        with _mortal(settings["longest_s"] + GRACE_S):
            reply = _answer(function, json.loads(line), settings["max_bytes"])
        reply["tired"] = served >= MAX_TASKS or _address_space() > settings["memory_bytes"] // 2
        _send(channel, reply)


@contextlib.contextmanager
def _mortal(seconds: float) -> Iterator[None]:
    """End the process with `seconds`, where `_end_with` does not notice in a task that the parent is gone.

    A signal with its default action again, which no C call that holds the interpreter can put off.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _readable(descriptor: int, parent: int) -> bool:
    """Wait for bytes; False once the parent is gone, also when a fork of the trainer keeps the other end open."""
    while not select.select([descriptor], [], [], PARENT_CHECK_S)[0]:
        if os.getppid() != parent:
            return False
    return True


def _answer(function: Callable[..., Any], task: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    try:
        value = function(*task["arguments"])
        size = len(json.dumps(value))
        if size > max_bytes // 2:
            raise ValueError(f"the result has {size} bytes, accepted are {max_bytes // 2}")
        return {"id": task["id"], "value": value}
    except Exception as error:  # noqa: BLE001 - what the verifier makes of the model's text is a result, not a fault
        return {"id": task["id"], "error": f"{type(error).__name__}: {str(error)[:500]}"}


def _address_space() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _send(channel: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    with contextlib.suppress(ConnectionError):
        while data:
            data = data[os.write(channel, data) :]


if __name__ == "__main__":
    main()
