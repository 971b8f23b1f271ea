"""One running sandbox, seen from the trusted side: its process, its pipes, and how it is ended without a trace."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.sandbox.levels import LEVELS, find_bwrap
from rl4llm.sandbox.program import Limits, Status
from rl4llm.sandbox.seccomp import seccomp_filter
from rl4llm.sandbox.wire import WireError, read, write

INSIDE = Path(__file__).with_name("_inside.py")
_COMPILE = (
    "import marshal, sys\n"
    "if sys.version_info < (3, 11): sys.exit('sandboxes need Python 3.11 or newer')\n"
    "code = compile(sys.stdin.read(), 'sandbox', 'exec', optimize=2); "
    "sys.stdout.write(marshal.dumps(code).hex())"
)
_LOAD = "import marshal, sys; exec(marshal.loads(bytes.fromhex(sys.argv[3])))"
START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
WEIGHED_EVERY_S = 0.05
KEPT_ERRORS = 16 * 1024
MAX_DRAINED = 4096  # pieces, each of which may be small
PAGE = os.sysconf("SC_PAGE_SIZE")


class Ended(Exception):
    """A sandbox is over before its time. `status` says whose fault that is."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


class BrokenTests(Ended):
    """The tests of a program do not work, however often they are tried."""

    def __init__(self, reason: str):
        super().__init__("infra_error", reason)


class Abandoned(BaseException):
    """The trainer is gone, so nobody waits for an answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where cells of one slot are started: the level, the interpreter, and the uid that they take; None is one's own."""

    level: str
    python: str
    uid: int | None
    packages: tuple[str, ...]
    owner: int  # a descriptor that becomes readable when the trainer is gone
    inside: str  # the code that runs inside, compiled by that interpreter


class Cell:
    """A sandbox with a bare Python in it that waits for its role. Use it for one program, then `end` it."""

    def __init__(self, place: Place, limits: Limits):
        self.place = place
        self.limits = limits
        self.inbox = bytearray()
        self.printed = {"out": bytearray(), "err": bytearray()}
        self.beside: Sequence[Cell] = ()  # cells that are weighed while this one is listened to
        self.directory = self._own_directory()
        requests, self._to = os.pipe()
        self._from, replies = os.pipe()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        theirs = [requests, replies, out, err]
        try:
            self.process = self._start(requests, replies, out, err)
        except BaseException:
            self._release()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._weighed = time.monotonic()
        self._ready = False
        self._poll = select.poll()
        for descriptor in (self._from, self._out, self._err):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(place.owner, select.POLLIN)
        os.set_blocking(self._to, False)

    def play(self, role: str, job: Mapping[str, Any]) -> None:
        """Wait until the sandbox stands, then say what it is to be; Ended, with infra_error where it does not stand."""
        if not self._ready:
            self._await_ready()
        limits = self.limits
        bounds = {
            "AS": int(limits.memory_bytes), "NPROC": self._processes(), "FSIZE": int(limits.disk_bytes), "CORE": 0,
            "NOFILE": 256, "CPU": int(limits.total_s) + 3, "MSGQUEUE": 0, "MEMLOCK": 65536,
        }  # fmt: skip
        message = {"role": role, "limits": bounds, "packages": list(self.place.packages), **job}
        self.send(message, time.monotonic() + limits.total_s)

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Hand a message over; raises Ended when the process is gone, does not read, or spoke before it was asked."""
        if self._ready and (self.inbox or self._pending()):
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
        """The next message; raises Ended when none comes in time, or none that can be read."""
        while (end := self.inbox.find(b"\n")) < 0:
            self._listen(deadline, what)
        line = bytes(self.inbox[:end])
        del self.inbox[: end + 1]
        try:
            return read(line)
        except WireError as error:
            raise Ended("model_error", str(error)) from None

    def drain(self) -> None:
        """Take what was printed so far and is still in the pipes, whoever goes on printing."""
        for name, descriptor in (("out", self._out), ("err", self._err)):
            for _ in range(MAX_DRAINED):
                if not self._read(name, descriptor):
                    break

    def end(self) -> None:
        """Kill all of it, and wait until nothing is left; raises Ended with infra_error when something stays."""
        pids = [*_descendants(self.process.pid), self.process.pid]
        for pid in reversed(pids):
            _kill(pid)
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Ended("infra_error", f"process {self.process.pid} could not be killed") from None
        finally:
            self._release()

    def _start(self, requests: int, replies: int, out: int, err: int) -> subprocess.Popen[bytes]:
        level = LEVELS[self.place.level]
        filter_fd = _filter_file()
        uid = self.place.uid
        start = level.start(
            self.place.python,
            [_LOAD, str(requests), str(replies), self.place.inside],
            directory=self.directory,
            disk_bytes=int(self.limits.disk_bytes),
            filter_fd=filter_fd,
            packages=self.place.packages,
            bwrap=find_bwrap() or "bwrap",
        )
        identity: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        passed = [requests, replies, *([filter_fd] if filter_fd is not None and start.needs_filter else [])]
        try:
            return subprocess.Popen(
                start.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(start.environment),
                cwd=start.directory,
                pass_fds=passed,
                start_new_session=True,
                umask=0o077,
                **identity,
            )
        except OSError as error:
            raise Ended("infra_error", f"{start.command[0]}: {error.strerror}") from error
        finally:
            if filter_fd is not None:
                os.close(filter_fd)

    def _own_directory(self) -> str | None:
        """A directory on the host for a level that hides none, which is removed with the cell."""
        if LEVELS[self.place.level].own_files:
            return None
        directory = tempfile.mkdtemp(prefix="rl4llm-sandbox-")
        if self.place.uid is not None:
            os.chown(directory, self.place.uid, self.place.uid)
        return directory

    def _processes(self) -> int:
        """The limit of processes; the kernel counts all of a user's where there is no user namespace."""
        others = 2 if LEVELS[self.place.level].own_files else 0
        if self.place.uid is None and not LEVELS[self.place.level].own_files:
            others = sum(_owner(entry) == os.getuid() for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return int(self.limits.processes) + others

    def _await_ready(self) -> None:
        try:
            message = self.receive(time.monotonic() + START_TIMEOUT_S, "the start of the sandbox")
        except Ended as ended:
            raise Ended("infra_error", ended.reason) from None
        if message != {"ready": True}:
            raise Ended("infra_error", "the sandbox began with what it should not say")
        self._ready = True

    def _listen(self, deadline: float, what: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Ended("model_error", f"timeout: {what} took too long")
        for descriptor, _ in self._poll.poll(min(left, WEIGHED_EVERY_S) * 1000):
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

    def _pending(self) -> bool:
        return bool(select.select([self._from], [], [], 0)[0]) and self._hears_more()

    def _hears_more(self) -> bool:
        self._hear()
        return bool(self.inbox)

    def _read(self, name: str, descriptor: int) -> int | None:
        """Take a piece of what was printed; 0 at the end of it, None when there is nothing now."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return None
        kept = self.printed[name]
        most = self.limits.output_bytes if name == "out" else KEPT_ERRORS
        kept += chunk[: max(0, int(most) + 1 - len(kept))]
        if name == "out" and len(kept) > most:
            raise Ended("model_error", f"it printed more than {most:g} bytes")
        return len(chunk)

    def _weigh(self) -> None:
        """End what holds too much memory in many processes, or too many files, which no limit of one process sees."""
        now = time.monotonic()
        if now - self._weighed < WEIGHED_EVERY_S:
            return
        self._weighed = now
        pids = _descendants(self.process.pid)
        if sum(map(_resident, pids)) > self.limits.memory_bytes:
            raise Ended("model_error", f"all its processes held more than {self.limits.memory_bytes:g} bytes")
        if self._ready and LEVELS[self.place.level].own_files and pids and _files(pids[-1]) > self.limits.files:
            raise Ended("model_error", f"it made more than {self.limits.files:g} files")

    def _last_words(self) -> str:
        """How the process ended, and the last line that it printed."""
        try:
            self.drain()
        except Ended as ended:
            return ended.reason
        lines = self.printed["err"][-2000:].decode(errors="replace").strip().splitlines()
        return f"the process ended{': ' + lines[-1][:300] if lines else ''}"

    def _release(self) -> None:
        for descriptor in (self._to, self._from, self._out, self._err):
            os.close(descriptor)
        if self.directory is not None:  # deep, or without permissions: what no recursion in here would survive
            subprocess.run(["chmod", "-R", "u+rwX", self.directory], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", self.directory], stderr=subprocess.DEVNULL, check=False)


def compiled_inside(python: str) -> str:
    """The code that runs in sandboxes, compiled once, since every sandbox would take 6 ms for it."""
    command = [python, "-s", "-S", "-c", _COMPILE]
    done = subprocess.run(command, input=INSIDE.read_text(), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Ended("infra_error", f"{python}: {done.stderr.strip()[-300:]}")
    return done.stdout


def end_strays(known: set[int]) -> None:
    """Kill and reap every child of this process but the known ones: what cells left to it when their first process ended."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while strays := [pid for pid in _children(os.getpid()) if pid not in known]:
        for pid in strays:
            for below in _descendants(pid):
                _kill(below)
            _kill(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        if time.monotonic() > deadline:
            raise Ended("infra_error", f"processes {strays} could not be killed")
        time.sleep(0.0005)


def _filter_file() -> int | None:
    content = seccomp_filter()
    if content is None:
        return None
    descriptor = os.memfd_create("filter")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for task in os.listdir(f"/proc/{pid}/task") for word in _text(f"/proc/{pid}/task/{task}/children")]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """Parents before their children."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in _children(parent)]
        found += level
    return found


def _text(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:
        return []


def _resident(pid: int) -> int:
    """Bytes of memory that a process does not share with files."""
    numbers = _text(f"/proc/{pid}/statm")
    return (int(numbers[1]) - int(numbers[2])) * PAGE if len(numbers) > 2 else 0


def _files(pid: int) -> int:
    used = 0
    for path in ("tmp", "dev/shm"):
        try:
            state = os.statvfs(f"/proc/{pid}/root/{path}")
        except OSError:
            continue
        used += state.f_files - state.f_ffree
    return used


def _owner(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return
