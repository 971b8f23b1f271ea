"""One program in a workspace: bubblewrap over the mounted tree, from its first limit to its exit code."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl4llm.extensions.workspaces import namespaces, network, tree
from rl4llm.runtime.seccomp import seccomp_filter

if TYPE_CHECKING:
    from rl4llm.extensions.workspaces.holder import Holder

SPARE_PROCESSES = 8  # the holder's and bwrap's, which the kernel counts too
OPEN_FILES = 4096
SHARED_MEMORY_BYTES = 64 << 20
NOT_STARTED = 127  # as a shell says it
KILLED = 128 + signal.SIGKILL
ZERO = "zero"  # a sparse file in the workspace's directory
GRACE = 16  # a workspace that is full may grow by this part of its limit with each start, to twice the limit
ALL = [
    "--unshare-user", "--uid", "0", "--gid", "0", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--hostname", "workspace", "--cap-drop", "ALL", "--die-with-parent", "--new-session",
    "--clearenv",
]  # fmt: skip


@dataclass(slots=True)
class Running:
    """A program that runs, and where to report its end."""

    number: int
    pid: int
    created: list[str]
    full_at: int  # bytes of the disk, above which it ends
    reason: str = ""  # the limit that ended it
    failure: str = ""  # the machine's fault that ended it
    oom_kills: int = 0  # of the machine, before it began
    _reply: int = -1
    _status: int = -1
    _ready: int = -1  # has a byte until all mounts are made

    def finish(self, *, killed: bool) -> None:
        """Report the exit code, the limit that ended the program, or why it never ran."""
        with open(self._status) as file:
            events = [json.loads(line) for line in file.read().splitlines()]
        code = next((event["exit-code"] for event in events if "exit-code" in event), None)
        ready = not os.read(self._ready, 1)
        os.close(self._ready)
        if code is None and ready and not killed:
            code = NOT_STARTED  # the words name no program, or one that the policy removed
        message: dict[str, Any] = {"code": KILLED if code is None else code, "reason": self.reason}
        if failure := self.failure or next((event["failure"] for event in events if "failure" in event), ""):
            message = {"error": failure}
        elif code and not killed and oom_kills() > self.oom_kills:
            message = {"error": "memory: the machine ran out of memory, and the kernel killed a process"}
        elif code is None and not killed:
            message = {"error": "start: bwrap failed"}
        with open(self._reply, "wb") as file:
            file.write(json.dumps(message).encode() + b"\n")


def launch(holder: Holder, order: dict[str, Any], reply: int, streams: Sequence[int]) -> Running:
    """Start the program of an order. Raises OSError if it cannot be prepared."""
    words, created = _arranged(holder, order)
    kills = oom_kills()
    status, write_status = os.pipe()
    ready, write_ready = os.pipe()
    os.write(write_ready, b"+")
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            namespaces.end_with_parent(parent)
            namespaces.new_network()
            network.listen(holder.gate, holder.ports)
            _become([*words, "--", *order["words"]], holder.order, streams, write_status, ready)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and its holder reports why
            os.write(write_status, json.dumps({"failure": f"start: {error}"}).encode())
        os._exit(1)
    for descriptor in (write_status, write_ready):
        os.close(descriptor)
    limit = holder.order["disk_bytes"]
    full_at = limit if holder.measured <= limit else min(holder.measured + limit // GRACE, 2 * limit)
    return Running(
        order["number"], pid, created, full_at, oom_kills=kills, _reply=reply, _status=status, _ready=ready
    )


def _arranged(holder: Holder, order: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Make the places of all mounts; return bwrap's words for them, and what was created for this start alone."""
    binds, files = holder.order["binds"], order["files"]
    visible, hidden = (
        [(inside, os.path.isdir(source)) for source, inside in pairs] for pairs in (binds, files)
    )
    system = [("/proc", True), ("/dev", True), (order["cwd"], True), *visible]
    paths, hidden_paths, created = holder.helped(lambda: tree.make_places(system, hidden))
    proc, dev, cwd = paths[:3]
    words = ["--bind", f"{os.getcwd()}/{tree.MERGED}", "/", "--proc", proc, "--dev", dev]
    # No limit counts the memory of a shared mapping of /dev/zero. A sparse file reads like it.
    words += ["--ro-bind", f"{os.getcwd()}/{ZERO}", f"{dev}/zero"]
    words += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", f"{dev}/shm"]
    # With a writable /proc, a program could lower its oom_score_adj and be spared when memory runs out.
    words += ["--remount-ro", proc, "--remount-ro", dev, "--chdir", cwd]
    for (source, _), inside in zip((*binds, *files), (*paths[3:], *hidden_paths), strict=True):
        words += ["--ro-bind", os.path.abspath(source), inside]
    return [*words, *(word for pair in order["env"].items() for word in ("--setenv", *pair))], created


def _become(
    words: Sequence[str], limits: dict[str, Any], streams: Sequence[int], status: int, ready: int
) -> None:
    """Become bwrap, with only the descriptors that it needs."""
    _limit(limits)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    options = {"--json-status-fd": status, "--block-fd": ready, "--seccomp": _filter()}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            os.set_inheritable(descriptor, descriptor in (0, 1, 2, *options.values()))
    described = [str(word) for option in options.items() for word in option]
    os.execv(limits["bwrap"], ["bwrap", *ALL, *described, *words])


def oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out."""
    with open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)


def find_bwrap() -> str | None:
    return shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")


def _limit(limits: dict[str, Any]) -> None:
    bounds = {
        "NPROC": limits["processes"] + SPARE_PROCESSES, "FSIZE": limits["disk_bytes"], "NOFILE": OPEN_FILES, "CORE": 0,
        "MSGQUEUE": 0, "MEMLOCK": 65536,
    }  # fmt: skip
    for name, bound in bounds.items():
        number = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(number)[1]
        value = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(number, (value, value))
    os.umask(0o022)
    os.setsid()


def _filter() -> int:
    descriptor = os.memfd_create("filter")
    os.write(descriptor, seccomp_filter(loopback=True, one_user=True) or b"")
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
