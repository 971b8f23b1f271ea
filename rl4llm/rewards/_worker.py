"""The body of a verifier process: reads one task per line, answers one line, and never outlives its parent by much.

`rl4llm.rewards.pool` runs this file by path, so that nothing of the trainer (torch above all) is imported here. It is
also why Python must be started with ``-P``: the directory of this file holds a `math.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARENT_CHECK_S = 1.0
GRACE_S = 1.0
MAX_TASKS = 5000


def main() -> None:
    """Load the verifier, say that it is ready, then answer tasks until the parent is gone."""
    settings = json.loads(sys.argv[1])
    channel = os.dup(0)
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
    _silence()
    _send(channel, {"ready": True})
    _serve(channel, function, settings)


def _end_with(lifeline: int) -> None:
    """End the process when the parent does: nobody ever writes to that socket, so its one event is the parent's end.

    The channel of the tasks is no such sign: the event of a task may come later than the task itself. The signal has its
    default action, which the kernel carries out even in the middle of a C call that holds the interpreter.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS knows the address-space limit but refuses to set it
        resource.setrlimit(kind, (value, value))


def _load(entry: str) -> Callable[..., Any]:
    """The function behind ``package.module:function`` or ``/path/to/file.py:function``."""
    module_name, _, attribute = entry.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), attribute)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None and spec.loader is not None  # there is one for whatever ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _silence() -> None:
    """Whatever libraries print from here on goes nowhere; before, it explains to the parent why a start failed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _serve(channel: int, function: Callable[..., Any], settings: dict[str, Any]) -> None:
    buffer = b""
    served = 0
    while True:
        while b"\n" not in buffer:
            chunk = _receive(channel, settings["parent"])
            if not chunk:
                return
            buffer += chunk
        line, _, buffer = buffer.partition(b"\n")
        served += 1
        with _mortal(settings["timeout_s"] + GRACE_S):
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


def _receive(channel: int, parent: int) -> bytes:
    """The next bytes of the parent; empty once it is gone, also when a fork of it keeps the other end open."""
    while not select.select([channel], [], [], PARENT_CHECK_S)[0]:
        if os.getppid() != parent:
            return b""
    try:
        return os.read(channel, 65536)
    except ConnectionError:
        return b""


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
