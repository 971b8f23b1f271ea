"""The keeper of a pool's workspaces, and the holder and gate of each: they end with the trainer and leave nothing."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl4llm.extensions.workspaces import namespaces, tree, unpack
from rl4llm.extensions.workspaces.network import Doors
from rl4llm.extensions.workspaces.start import Running, launch
from rl4llm.runtime import processes

PARENT_CHECK_S = 1.0
WATCHED_EVERY_S, CLOSELY_S = 0.25, 0.05
MEASURED_EVERY_S, MEASURED_SHARE = 0.5, 10  # a measurement of the disk may take one tenth of the time
# until the next measurement the whole disk may lose this much
UNMEASURED_S, UNMEASURED_BYTES, UNMEASURED_FILES = 5.0, 8 << 20, 2000
RESERVE_BYTES, RESERVE_FILES = 256 << 20, 10_000  # free on the machine's disk, below which workspaces end
FILE_BYTES = 1024  # of the kernel's memory, for a file in memory
HELPER_S, COMPARED_S, ARCHIVE_S = 30, 10, 3600
SHORT = "/sys"  # where a holder sees the workspace's directory, whose real path it may not enter
LOCK = "lock"
_ROOT = str(Path(__file__).parents[3])


def main() -> None:
    """Open workspaces until the trainer ends, and then remove everything."""
    parent, base = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1)
    with open(os.open(f"{base}/{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600), closefd=False) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process and all holders have ended
    os.rename(f"{base}/{LOCK}.new", f"{base}/{LOCK}")
    control = socket.socket(fileno=0)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == parent:  # a fork of the trainer may keep the connection open
        if poll.poll(PARENT_CHECK_S * 1000) and not _open(control):
            break
        _reap()
    for pid in processes.descendants_of(os.getpid()):
        processes.kill(pid)
    while _reap():
        time.sleep(0.005)
    remove(base)


def program(module: str, *words: str) -> list[str]:
    """Return the words that run `main` of a module of this package in a separate process."""
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__package__} import {module}; {module}.main()"
    return [sys.executable, "-I", "-c", code, *words]


def remove(directory: str) -> None:
    """Remove a tree that may be deep, or without permissions."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(directory):
            subprocess.run(
                [*command, directory], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
            )


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next order and its descriptors; an empty order at the end of the connection."""
    word, descriptors = namespaces.receive_descriptors(control)
    if not word:
        return {}, []
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return json.load(file), descriptors[1:]


def _open(control: socket.socket) -> bool:
    order, descriptors = receive(control)
    if not order:
        return False
    keeper = os.getpid()
    doors = Doors(order["sockets"], order["network"], order["proxy"])
    gate, holders_gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if doors.ports and os.fork() == 0:
            for descriptor in (control.fileno(), holders_gate.fileno(), *descriptors):
                os.close(descriptor)
            _guard(doors, gate, keeper)
        gate.close()
        if namespaces.enter() == 0:
            control.close()
            _hold(order, keeper, doors.ports, holders_gate, *descriptors)
    except OSError as error:
        answer(descriptors[0], {"error": f"namespaces: {error}"})
    for descriptor in (holders_gate.detach(), *descriptors):
        os.close(descriptor)
    return True


def _guard(doors: Doors, gate: socket.socket, keeper: int) -> None:
    """Be the gate of one workspace until its holder ends."""
    try:
        namespaces.end_with_parent(keeper)
        doors.serve(gate)
    finally:
        os._exit(0)


def _reap() -> bool:
    """Reap children that ended; return whether there are others."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def answer(reply: int, message: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(reply, json.dumps(message).encode() + b"\n")


def _hold(
    order: dict[str, Any], keeper: int, ports: list[int], gate: socket.socket, reply: int, connection: int
) -> None:
    """Be the holder of one workspace until the connection ends."""
    try:
        holder = Holder(order, socket.socket(fileno=connection), keeper, ports, gate)
        answer(reply, {})
        holder.serve()
    except OSError as error:
        answer(reply, {"error": f"mount: {error}"})
    finally:
        os._exit(0)


class Holder:
    """A process in the workspace's namespaces: it has the tree mounted, starts programs, and watches their limits."""

    def __init__(
        self,
        order: dict[str, Any],
        control: socket.socket,
        keeper: int,
        ports: list[int],
        gate: socket.socket,
    ):
        self.order, self.control = order, control
        self.ports, self.gate = ports, gate
        self.running: Running | None = None
        # by pid: where it writes what it measured, and when it began
        self._helpers: dict[int, tuple[int, float] | None] = {}
        self.measured, self._measure_at = 0, 0.0
        self._free = (0, 0)  # of the whole disk at the last measurement: bytes, and files
        self._mount()
        namespaces.end_with_parent(keeper)
        namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, workspaces are killed before the trainer
        self._bell, bell = os.pipe()
        for descriptor in (self._bell, bell):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer orders, and watch the program that runs, until the connection ends."""
        poll = select.poll()
        for descriptor in (self.control.fileno(), self._bell):
            poll.register(descriptor, select.POLLIN)
        wait_s = None
        while True:
            for descriptor, _ in poll.poll(wait_s and wait_s * 1000):
                if descriptor == self._bell:
                    os.read(self._bell, 4096)
                elif not self._obey():
                    return self._end()
            self._collect()
            wait_s = self._watch() if self.running else None

    def _mount(self) -> None:
        namespaces.mount("none", "/", flags=namespaces.RECURSIVE | namespaces.SLAVE)
        places = [(os.open(self.order[name], os.O_PATH), name) for name in ("directory", "lower")]
        namespaces.become_root()
        namespaces.mount(f"/proc/self/fd/{places[0][0]}", SHORT, flags=namespaces.BIND)
        os.chdir(SHORT)
        namespaces.mount(f"/proc/self/fd/{places[1][0]}", f"{SHORT}/{tree.LOWER}", flags=namespaces.BIND)
        for descriptor, _ in places:
            os.close(descriptor)
        layers = f"lowerdir={SHORT}/lower,upperdir={SHORT}/upper,workdir={SHORT}/work,userxattr"
        namespaces.mount("overlay", f"{SHORT}/{tree.MERGED}", "overlay", options=layers)

    def _obey(self) -> bool:
        order, descriptors = receive(self.control)
        if order:
            work: dict[str, Callable[..., None]] = {
                "start": self._start, "kill": self._stop, "read": self._read, "write": self._write,
                "changes": self._changes, "unpack": self._archive, "pack": self._archive,
            }  # fmt: skip
            work[order["what"]](order, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(order)

    def _start(self, order: dict[str, Any], reply: int, *streams: int) -> None:
        if self.running:
            self._kill("another start")
        try:
            self.running = launch(self, order, os.dup(reply), streams)
            answer(reply, {})
        except OSError as error:
            answer(reply, {"error": f"start: {error}"})

    def _stop(self, order: dict[str, Any]) -> None:
        if self.running and self.running.number == order["number"]:
            self._kill("")

    def _kill(self, reason: str) -> None:
        """Kill the program with everything it started, and wait until nothing of it is left."""
        running = self.running
        assert running is not None
        running.reason = reason or running.reason
        for pid in (*processes.descendants_of(running.pid), running.pid):
            processes.kill(pid)
        os.waitpid(running.pid, 0)
        self._ended(killed=True)

    def _ended(self, *, killed: bool = False) -> None:
        running, self.running = self.running, None
        assert running is not None
        while strays := [pid for pid in processes.children_of(os.getpid()) if pid not in self._helpers]:
            for pid in strays:  # the first process of the program's namespace; its others end before it
                processes.kill(pid)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        if running.created:
            self.helped(lambda: tree.remove_places(running.created))
        running.finish(killed=killed)

    def _collect(self) -> None:
        """Reap what ended: the program, and helpers with what they measured."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if self.running and ended[0] == self.running.pid:
                    self._ended()
                elif measurement := self._helpers.pop(ended[0], None):
                    with open(measurement[0]) as file:
                        self.measured = int(file.read() or self.measured)
                    now = time.monotonic()
                    self._measure_at = now + max(MEASURED_EVERY_S, MEASURED_SHARE * (now - measurement[1]))

    def _watch(self) -> float:
        """End the program if it holds too much memory or disk; return the seconds until the next look."""
        running = self.running
        assert running is not None
        pids = processes.descendants_of(running.pid)
        inside = processes.first_alive(pids)
        files, in_files = processes.files_of(inside, ["dev/shm"])
        used = sum(map(processes.resident, pids)) + processes.in_sockets(inside)
        used += in_files + files * FILE_BYTES
        if used > self.order["memory_bytes"]:
            self._kill(f"all its processes held more than {self.order['memory_bytes']} bytes of memory")
        elif self.measured > running.full_at:
            self._kill(f"its files held more than {self.order['disk_bytes']} bytes of the disk")
        elif (free := _free(SHORT))[0] < RESERVE_BYTES or free[1] < RESERVE_FILES:
            running.failure = f"disk: the machine has {free[0]} bytes and {free[1]} files free, too few"
            self._kill("")
        else:
            self._measure(pids)
        return CLOSELY_S if used > self.order["memory_bytes"] / 4 else WATCHED_EVERY_S

    def _measure(self, pids: list[int]) -> None:
        """Begin to measure the disk, if it is time."""
        now, free = time.monotonic(), _free(SHORT)
        lost = (self._free[0] - free[0]) / UNMEASURED_BYTES, (self._free[1] - free[1]) / UNMEASURED_FILES
        due = max(lost) >= 1 or now > self._measure_at + UNMEASURED_S
        if any(self._helpers.values()) or now < self._measure_at or not due:
            return
        self._free = free
        result, write = os.pipe()

        def measure() -> None:
            os.write(write, str(tree.size(pids, 2 * self.order["disk_bytes"])).encode())

        self._helpers[self._help(measure)] = (result, now)
        os.close(write)

    def _help(self, work: Callable[[], None], seconds: int = HELPER_S) -> int:
        """Do work in a separate process, which is bounded and may be locked into the tree; return its pid."""
        holder = os.getpid()
        if pid := os.fork():
            self._helpers[pid] = None
            return pid
        try:
            namespaces.end_with_parent(holder)
            signal.alarm(seconds)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the process ends here; its reply ends without a result
            os._exit(1)

    def helped(self, work: Callable[[], Any]) -> Any:
        """Return the result of work that a separate process does. Raises OSError if it fails."""
        result, write = os.pipe()

        def told() -> None:
            try:
                answer(write, {"result": work()})
            except OSError as error:
                answer(write, {"error": str(error)})

        pid = self._help(told)
        os.close(write)
        with open(result) as file:
            line = file.read()
        os.waitpid(pid, 0)
        del self._helpers[pid]
        message = json.loads(line or '{"error": "a helper ended"}')
        if "error" in message:
            raise OSError(message["error"])
        return message["result"]

    def _read(self, order: dict[str, Any], reply: int) -> None:
        def read() -> None:
            content = tree.read(os.path.join("/", self.order["cwd"], order["path"]), order["limit"])
            _send(reply, {"absent": content is None}, iter([content or b""]))

        self._help(read)

    def _write(self, order: dict[str, Any], reply: int, content: int) -> None:
        def write() -> None:
            with open(content, "rb") as file:
                file.seek(0)
                data = file.read()
            try:
                tree.write(os.path.join("/", self.order["cwd"], order["path"]), data, order["mode"])
            except OSError as error:
                answer(reply, {"error": f"write: {error}"})
            else:
                answer(reply, {})

        self._help(write)

    def _changes(self, order: dict[str, Any], reply: int) -> None:
        def compare() -> None:
            signal.signal(signal.SIGALRM, _late)
            signal.setitimer(signal.ITIMER_REAL, COMPARED_S, 1.0)
            _send(reply, {}, (piece.encode(errors="replace") for piece in tree.changes()), order["limit"])

        self._help(compare)

    def _archive(self, order: dict[str, Any], reply: int, archive: int) -> None:
        def work() -> None:
            tree.lock_into(tree.MERGED)
            packs = order["what"] == "pack"
            with open(archive, "wb" if packs else "rb") as file:
                unpack.pack(file) if packs else unpack.apply(file)
            answer(reply, {})

        self._help(work, ARCHIVE_S)

    def _end(self) -> None:
        if self.running:
            self._kill("the workspace was closed")


def _send(reply: int, header: dict[str, Any], pieces: Iterator[bytes], limit: int = sys.maxsize) -> None:
    """Write an answer: a header, bytes up to the limit, and a mark that nothing is missing."""
    os.set_blocking(reply, True)
    with open(reply, "wb", closefd=False) as file:
        file.write(json.dumps(header).encode() + b"\n")
        try:
            for piece in pieces:
                file.write(piece[:limit])
                limit -= len(piece)
                if limit < 0:
                    break
        except _LateError:
            file.write(b"[... the rest takes too long to compare ...]\n")
        signal.setitimer(signal.ITIMER_REAL, 0)
        file.write(b"\0")


class _LateError(BaseException):
    """A policy's files take too long to compare, so the rest is left out."""


def _late(*_: object) -> None:
    raise _LateError


def _free(path: str) -> tuple[int, int]:
    """Return how many bytes and files the disk of a path has free."""
    disk = os.statvfs(path)
    return (
        disk.f_bavail * disk.f_frsize,
        disk.f_favail if disk.f_files else sys.maxsize,
    )  # without a limit of files
