"""The holder of a workspace, in its namespaces: it has the tree mounted, starts programs, and watches their limits."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rl4llm.extensions.workspaces import namespaces, tree, unpack
from rl4llm.extensions.workspaces.orders import answer, receive
from rl4llm.extensions.workspaces.start import Running, launch
from rl4llm.runtime import processes

WATCHED_EVERY_S, CLOSELY_S = 0.25, 0.05
MEASURED_EVERY_S, MEASURED_SHARE = 0.5, 10  # a measurement of the disk may take one tenth of the time
# until the next measurement the whole disk may lose this much
UNMEASURED_S, UNMEASURED_BYTES, UNMEASURED_FILES = 5.0, 8 << 20, 2000
RESERVE_BYTES, RESERVE_FILES = 256 << 20, 10_000  # free on the machine's disk, below which workspaces end
FILE_BYTES = 1024  # of the kernel's memory, for a file in memory
HELPER_S, PACK_S = 30, 3600
SHORT = "/sys"  # where a holder sees the workspace's directory, whose real path it may not enter


class Holder:
    """Obeys the orders of one workspace, and ends what runs in it with its connection."""

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
        self._helpers: set[int] = set()
        self._measuring: tuple[int, int, float] | None = None  # the helper, its pipe, and when it began
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

    def serve(self, reply: int) -> None:
        """Report that the tree is mounted; answer orders, and watch the program that runs, until the connection ends."""
        answer(reply, {})
        poll = select.poll()
        for descriptor in (self.control.fileno(), self._bell):
            poll.register(descriptor, select.POLLIN)
        wait_s = None
        while True:
            for descriptor, _ in poll.poll(wait_s and wait_s * 1000):
                if descriptor == self._bell:
                    os.read(self._bell, 4096)
                elif not self._obey():
                    return self._kill("")
            self._collect()
            wait_s = self._watch() if self.running else None

    def _mount(self) -> None:
        namespaces.mount("none", "/", flags=namespaces.RECURSIVE | namespaces.SLAVE)
        directory, lower = (os.open(self.order[name], os.O_PATH) for name in ("directory", "lower"))
        namespaces.become_root()
        namespaces.mount(f"/proc/self/fd/{directory}", SHORT, flags=namespaces.BIND)
        os.chdir(SHORT)
        namespaces.mount(f"/proc/self/fd/{lower}", f"{SHORT}/{tree.LOWER}", flags=namespaces.BIND)
        for descriptor in (directory, lower):
            os.close(descriptor)
        layers = f"lowerdir={SHORT}/lower,upperdir={SHORT}/upper,workdir={SHORT}/work,userxattr"
        namespaces.mount("overlay", f"{SHORT}/{tree.MERGED}", "overlay", options=layers)

    def _obey(self) -> bool:
        order, descriptors = receive(self.control)
        if not order:
            return False
        what, place = order["what"], os.path.join("/", self.order["cwd"], order.get("path", ""))
        work: dict[str, Callable[[], Any]] = {
            "read": lambda: tree.read(place, order["limit"]),
            "write": lambda: tree.write(place, order["content"]),
            "changes": lambda: tree.changes(order["limit"]),
            "pack": lambda: unpack.pack(descriptors[1]),
        }
        if what == "start":
            self._start(order, *descriptors)
        elif what == "kill":
            if self.running and self.running.number == order["number"]:
                self._kill("")
        else:
            self._help(descriptors[0], work[what], PACK_S if what == "pack" else HELPER_S, f"{what}: ")
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _start(self, order: dict[str, Any], reply: int, *streams: int) -> None:
        self._kill("another start")
        try:
            self.running = launch(self, order, os.dup(reply), streams)
            answer(reply, {})
        except OSError as error:
            answer(reply, {"error": f"start: {error}"})

    def _kill(self, reason: str) -> None:
        """Kill the program with everything it started, and wait until nothing of it is left."""
        if self.running is None:
            return
        self.running.reason = reason or self.running.reason
        for pid in (*processes.descendants_of(self.running.pid), self.running.pid):
            processes.kill(pid)
        os.waitpid(self.running.pid, 0)
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
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._helpers.discard(pid)
                if self.running and pid == self.running.pid:
                    self._ended()
                elif self._measuring and pid == self._measuring[0]:
                    _, result, began = self._measuring
                    self._measuring = None
                    with open(result) as file:
                        self.measured = json.loads(file.read() or "{}").get("result", self.measured)
                    now = time.monotonic()
                    self._measure_at = now + max(MEASURED_EVERY_S, MEASURED_SHARE * (now - began))

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
            self._measure(pids, free)
        return CLOSELY_S if used > self.order["memory_bytes"] / 4 else WATCHED_EVERY_S

    def _measure(self, pids: list[int], free: tuple[int, int]) -> None:
        """Begin to measure the disk, if it is time."""
        now = time.monotonic()
        lost = (self._free[0] - free[0]) / UNMEASURED_BYTES, (self._free[1] - free[1]) / UNMEASURED_FILES
        due = max(lost) >= 1 or now > self._measure_at + UNMEASURED_S
        if due and self._measuring is None and now >= self._measure_at:
            self._free = free
            result, write = os.pipe()
            pid = self._help(write, lambda: tree.size(pids, 2 * self.order["disk_bytes"]))
            self._measuring = pid, result, now
            os.close(write)

    def _help(self, reply: int, work: Callable[[], Any], seconds: int = HELPER_S, step: str = "") -> int:
        """Answer with the result of work in a separate process, which may be locked into the tree; return its pid."""
        holder = os.getpid()
        if pid := os.fork():
            self._helpers.add(pid)
            return pid
        try:
            namespaces.end_with_parent(holder)
            signal.alarm(seconds)
            answer(reply, {"result": work()})
        except OSError as error:
            answer(reply, {"error": f"{step}{error}"})
        finally:
            os._exit(0)

    def helped(self, work: Callable[[], Any]) -> Any:
        """Return the result of work that a separate process does. Raises OSError if it fails."""
        result, write = os.pipe()
        pid = self._help(write, work)
        os.close(write)
        with open(result) as file:
            message = json.loads(file.read() or '{"error": "a helper ended"}')
        os.waitpid(pid, 0)
        self._helpers.discard(pid)
        if "error" in message:
            raise OSError(message["error"])
        return message["result"]


def _free(path: str) -> tuple[int, int]:
    """Return how many bytes and files the disk of a path has free; a disk without a limit of files has f_files 0."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else sys.maxsize
