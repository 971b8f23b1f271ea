"""One running sandbox, seen from the trusted side: its process, its pipes, and how it ends without leftovers."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.extensions.sandbox.levels import ENVIRONMENT, LEVELS, bubblewrap
from rl4llm.extensions.sandbox.packages import Mounted, import_paths
from rl4llm.extensions.sandbox.program import Limits, Status
from rl4llm.extensions.sandbox.wire import WireError, read, write
from rl4llm.runtime import processes
from rl4llm.runtime.seccomp import seccomp_filter

INSIDE = [Path(__file__).with_name(name) for name in ("_inside.py", "_inside_objects.py", "_inside_tests.py")]
_COMPILE = (
    "import marshal, sys, zlib\n"
    "if sys.version_info < (3, 11): sys.exit('sandboxes need Python 3.11 or newer')\n"
    "code = compile(sys.stdin.read(), 'sandbox', 'exec', optimize=2); "
    "sys.stdout.write(zlib.compress(marshal.dumps(code)).hex())"
)
_LOAD = (  # an argument has at most 128 KiB
    "import marshal, sys, zlib; exec(marshal.loads(zlib.decompress(bytes.fromhex(sys.argv[3]))))"
)
START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
WEIGHED_EVERY_S = 0.05
KEPT_ERRORS = 16 * 1024
MAX_DESCRIPTORS = 128
MAX_DRAINED = 4096  # pieces, each of which may be small


class Ended(Exception):
    """A sandbox ended early. `status` says whose fault that is."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class BrokenTests(Ended):
    """The tests of a program do not work, however often they are run."""

    def __init__(self, reason: str):
        super().__init__("infra_error", reason)


class Abandoned(BaseException):
    """The trainer has ended and needs no answer."""


@dataclass(frozen=True, slots=True)
class CellSite:
    """Where cells of one slot are started: the level, the interpreter, and their uid (None for the current user)."""

    level: str
    python: str
    uid: int | None
    packages: tuple[Mounted, ...]
    owner: int  # a descriptor that becomes readable when the trainer is gone
    inside: str  # the code that runs inside, compiled by that interpreter
    loopback: bool = False  # whether programs may open Internet sockets, which connect only to themselves


class Cell:
    """A sandbox with a bare Python in it that waits for its role. Use it for one program, then `end` it."""

    def __init__(self, place: CellSite, limits: Limits):
        self.place = place
        self.limits = limits
        self.inbox = bytearray()
        self.printed = {"out": bytearray(), "err": bytearray()}
        self.beside: Sequence[Cell] = ()  # cells whose memory is checked while this one is read
        self.directory = self._own_directory()
        requests, self._to = os.pipe()
        self._from, replies = os.pipe()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        with ExitStack() as theirs, ExitStack() as undo:
            for descriptor in (requests, replies, out, err):
                theirs.callback(os.close, descriptor)
            undo.callback(self._release)
            self.process = self._start(requests, replies, out, err)
            undo.pop_all()
        self._weighed = time.monotonic()
        self._ready = False
        self._poll = select.poll()
        for descriptor in (self._from, self._out, self._err):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(place.owner, select.POLLIN)
        os.set_blocking(self._to, False)

    def await_ready(self) -> None:
        """Wait until the sandbox is ready. Raises Ended with infra_error if it does not start."""
        if self._ready:
            return
        try:
            self.receive(time.monotonic() + START_TIMEOUT_S, "the start of the sandbox")
        except Ended as ended:
            raise Ended("infra_error", ended.reason) from None
        self._ready = True

    def play(self, role: str, job: Mapping[str, Any]) -> None:
        """Send the role, when the sandbox is ready."""
        self.await_ready()
        limits = self.limits
        bounds = {
            "AS": limits.memory_bytes, "NPROC": self._processes(), "FSIZE": limits.disk_bytes, "CORE": 0,
            "NOFILE": MAX_DESCRIPTORS, "CPU": int(limits.total_s) + 3, "MSGQUEUE": 0, "MEMLOCK": 65536,
        }  # fmt: skip
        packages = import_paths(self.place.packages, LEVELS[self.place.level].own_files)
        message = {"role": role, "limits": bounds, "packages": packages, **job}
        self.send(message, time.monotonic() + limits.total_s)

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Send a message. Raises Ended if the process has ended, does not read, or sent something before it was asked."""
        if self._ready and not self.inbox and select.select([self._from], [], [], 0)[0]:
            self._hear()
        if self._ready and self.inbox:
            raise Ended("model_error", "it answered before it was asked")
        data = memoryview(write(message))
        poll = select.poll()
        poll.register(self._to, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Ended("model_error", "it took no more requests")
            try:
                data = data[os.write(self._to, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Ended("model_error", self._last_words()) from None

    def receive(self, deadline: float, what: str = "the call") -> dict[str, Any]:
        """Return the next message. Raises Ended on a timeout and for a message that cannot be parsed."""
        while (end := self.inbox.find(b"\n")) < 0:
            self._listen(deadline, what)
        line = bytes(self.inbox[:end])
        del self.inbox[: end + 1]
        try:
            return read(line)
        except WireError as error:
            raise Ended("model_error", str(error)) from None

    def drain(self) -> None:
        """Read what is still in the pipes, up to a limit."""
        for name, descriptor in (("out", self._out), ("err", self._err)):
            for _ in range(MAX_DRAINED):
                if not self._read(name, descriptor):
                    break

    def end(self) -> None:
        """Kill all of its processes and wait for their end. Raises Ended with infra_error if one remains."""
        pids = [*processes.descendants_of(self.process.pid), self.process.pid]
        for pid in reversed(pids):
            processes.kill(pid)
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Ended("infra_error", f"process {self.process.pid} could not be killed") from None
        finally:
            self._release()

    def _start(self, requests: int, replies: int, out: int, err: int) -> subprocess.Popen[bytes]:
        place, uid, filter_fd = self.place, self.place.uid, None
        command = [place.python, "-s", "-S", "-B", "-c", _LOAD, str(requests), str(replies), place.inside]
        environment = {**ENVIRONMENT, "HOME": str(self.directory), "TMPDIR": str(self.directory)}
        if self.directory is None:
            filter_fd, environment = _filter_file(place.loopback), {}
            command = bubblewrap(command, self.limits.disk_bytes, filter_fd, place.packages)
        identity: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=self.directory or "/",
                pass_fds=[requests, replies, *([] if filter_fd is None else [filter_fd])],
                start_new_session=True,
                umask=0o077,
                **identity,
            )
        except OSError as error:
            raise Ended("infra_error", f"{command[0]}: {error.strerror}") from error
        finally:
            if filter_fd is not None:
                os.close(filter_fd)

    def _own_directory(self) -> str | None:
        """Create a directory on the host for a level that does not isolate files; it is removed with the cell."""
        if LEVELS[self.place.level].own_files:
            return None
        directory = tempfile.mkdtemp(prefix="rl4llm-sandbox-")
        if self.place.uid is not None:
            os.chown(directory, self.place.uid, self.place.uid)
        return directory

    def _processes(self) -> int:
        """Return the process limit; without a user namespace, the kernel counts all processes of a user."""
        running = 2 if LEVELS[self.place.level].own_files else 0
        if self.place.uid is None and not LEVELS[self.place.level].own_files:
            pids = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            running = sum(processes.owner_of(entry) == os.getuid() for entry in pids)
        return self.limits.processes + running

    def _listen(self, deadline: float, what: str) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise Ended("model_error", f"timeout: {what} took too long")
        for descriptor, _ in self._poll.poll(min(remaining_s, WEIGHED_EVERY_S) * 1000):
            if descriptor == self.place.owner:
                raise Abandoned
            if descriptor == self._from:
                self._hear()
            else:
                name = "out" if descriptor == self._out else "err"
                if self._read(name, descriptor) == 0:
                    self._poll.unregister(descriptor)
        for cell in (self, *self.beside):
            cell._weigh()

    def _hear(self) -> None:
        try:
            chunk = os.read(self._from, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            raise Ended("model_error", self._last_words())
        self.inbox += chunk
        if len(self.inbox) > self.limits.output_bytes:
            raise Ended("model_error", f"it answered with more than {self.limits.output_bytes:g} bytes")

    def _read(self, name: str, descriptor: int) -> int | None:
        """Read a piece of the output; return 0 at its end, None if there is nothing yet."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return None
        printed = self.printed[name]
        most = self.limits.output_bytes if name == "out" else KEPT_ERRORS
        printed += chunk[: max(0, most + 1 - len(printed))]
        if name == "out" and len(printed) > most:
            raise Ended("model_error", f"it printed more than {most:g} bytes")
        return len(chunk)

    def _weigh(self) -> None:
        """End a sandbox with too much memory in processes, sockets and files, or with too many files.

        The limits of single processes do not cover these sums.
        """
        now = time.monotonic()
        if now - self._weighed < WEIGHED_EVERY_S:
            return
        self._weighed = now
        pids = processes.descendants_of(self.process.pid)
        used, files = sum(map(processes.resident, pids)), 0
        if self._ready and LEVELS[self.place.level].own_files and (inside := processes.first_alive(pids)):
            files, in_files = processes.files_of(inside)
            used += in_files + processes.in_sockets(inside)
        if used > self.limits.memory_bytes:
            raise Ended("model_error", f"all its processes held more than {self.limits.memory_bytes:g} bytes")
        if files > self.limits.files:
            raise Ended("model_error", f"it made more than {self.limits.files:g} files")

    def _last_words(self) -> str:
        """Return how the process ended, and the last line that it printed."""
        try:
            self.drain()
        except Ended as ended:
            return ended.reason
        lines = self.printed["err"][-2000:].decode(errors="replace").strip().splitlines()
        return f"the process ended{': ' + lines[-1][:300] if lines else ''}"

    def _release(self) -> None:
        for descriptor in (self._to, self._from, self._out, self._err):
            os.close(descriptor)
        # may be deeply nested or without permissions, which shutil.rmtree would not survive
        if self.directory is not None:
            subprocess.run(["chmod", "-R", "u+rwX", self.directory], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", self.directory], stderr=subprocess.DEVNULL, check=False)


def compiled_inside(python: str) -> str:
    """Return the code that runs in sandboxes, compiled once, since compiling takes 6 ms."""
    command = [python, "-s", "-S", "-c", _COMPILE]
    text = "".join(path.read_text() for path in INSIDE)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"{python}: {done.stderr.strip()[-300:]}")
    return done.stdout


def end_strays(cells: set[int]) -> None:
    """Kill and reap every child of this process except `cells`: processes that cells left behind."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while strays := [pid for pid in processes.children_of(os.getpid()) if pid not in cells]:
        for pid in strays:
            for descendant in (*processes.descendants_of(pid), pid):
                processes.kill(descendant)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise Ended("infra_error", f"processes {strays} could not be killed")
        time.sleep(0.0005)


def _filter_file(loopback: bool) -> int | None:
    content = seccomp_filter(loopback=loopback)
    if content is None:
        return None
    descriptor = os.memfd_create("filter")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
