"""Worker processes for verifiers that may hang, crash or eat memory on what a model wrote.

Parsers and computer algebra never see a model's text in the trainer's process. They run in a few preloaded workers, one
task at a time each; the parent owns the time limit, kills what exceeds it, and starts a fresh worker. What comes back
tells whose fault it was: `Timeout` and `Crash` are the text's, `Unavailable` is the machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError, RL4LLMError

MAX_MESSAGE_BYTES = 64 * 1024
START_ATTEMPTS = 3
TASK_ATTEMPTS = 2
_WORKER_FILE = Path(__file__).with_name("_worker.py")
# Neither keys and tokens nor accelerators are a verifier's business.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class RewardFailure(RL4LLMError):
    """A reward could not be computed through no fault of the model; the sample is left out, never scored 0."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a task has no result."""

    reason: str


class Timeout(Fault):
    """The task ran into the time limit: the text's fault."""


class Crash(Fault):
    """The verifier raised, or its process died on this task every time: the text's fault."""


class Unavailable(Fault):
    """No worker could be started: nobody's text is to blame."""


@dataclass(eq=False, slots=True)
class _Worker:
    """One process, the socket to it, and what it is doing. `task` is the index of the task under way.

    Nothing is ever written to `lifeline`: the worker ends when it is closed.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket
    lifeline: socket.socket
    log: Any
    deadline: float
    ready: bool = False
    task: int | None = None
    inbox: bytearray = field(default_factory=bytearray)

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def send(self, task: int, message: bytes, timeout_s: float) -> bool:
        """Hand a task over; False when the process is gone or does not read."""
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        try:
            self.channel.settimeout(timeout_s)
            self.channel.sendall(message)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """A whole message if there is one; EOFError when there will never be one."""
        try:
            chunk = self.channel.recv(MAX_MESSAGE_BYTES)
        except OSError:
            chunk = b""
        self.inbox += chunk
        if not chunk or len(self.inbox) > MAX_MESSAGE_BYTES:
            raise EOFError
        line, newline, rest = self.inbox.partition(b"\n")
        if not newline:
            return None
        self.inbox = rest
        try:
            return json.loads(line)
        except ValueError as error:
            raise EOFError from error

    def stop(self) -> None:
        """Kill the process and reap it."""
        self.channel.close()
        self.lifeline.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.log.close()

    def last_words(self) -> str:
        """How the process ended and the end of what it printed, for messages."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        code = self.process.poll()
        self.log.seek(0)
        lines = self.log.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"{_exit_text(code)}{': ' + lines[-1] if lines else ''}"


@dataclass(slots=True)
class _Job:
    """The tasks of one `map`: which still wait, how often each was tried, what came of each."""

    messages: list[bytes]
    outcomes: dict[int, Any] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    waiting: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for index, message in enumerate(self.messages):
            if len(message) > MAX_MESSAGE_BYTES:
                self.outcomes[index] = Crash(f"the task has {len(message)} bytes, accepted are {MAX_MESSAGE_BYTES}")
            else:
                self.waiting.append(index)

    @property
    def open(self) -> bool:
        return len(self.outcomes) < len(self.messages)


class VerifierPool:
    """Preloaded worker processes that run one function.

    Args:
        entry: the function, as ``package.module:function`` or ``/path/to/file.py:function``. It takes and returns JSON
            values. A file by path is imported without its package, which keeps the workers light.
        workers: processes, each with one task at a time.
        timeout_s: time limit of one task. The worker is killed then, and another takes its place.
        memory_bytes: address space of one worker; allocating more raises MemoryError inside it.
        start_timeout_s: how long a worker may take to import what it needs.
        warm_up: argument lists that every worker runs before its first task, so that the first task is not slow.

        >>> pool = VerifierPool("operator:add")
        >>> pool.map([[1, 2], ["a", 3]])
        [3, Crash(reason='TypeError: can only concatenate str (not "int") to str')]

    Workers start at the first use. `map` may be called from any thread and inside an event loop; it blocks. A worker
    that dies on a task is replaced and the task tried once more, so that a process killed from outside costs nothing.
    Workers end with their parent, whatever ends it. `counts` has totals: tasks, timeout, crash, unavailable, started.
    """

    def __init__(
        self,
        entry: str,
        *,
        workers: int = 2,
        timeout_s: float = 2.0,
        memory_bytes: int = 1024**3,
        start_timeout_s: float = 60.0,
        warm_up: Sequence[Sequence[Any]] = (),
    ):
        limits = {"workers": workers, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
        for name, value in (limits | {"start_timeout_s": start_timeout_s}).items():
            if not value > 0:
                raise ConfigError(f"VerifierPool: {name}={value!r} is not accepted: above 0.")
        self.entry = entry
        self.workers = workers
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.start_timeout_s = start_timeout_s
        self.warm_up_arguments = [list(arguments) for arguments in warm_up]
        self.counts: Counter[str] = Counter()
        self._reset()

    def map(self, tasks: Sequence[Sequence[Any]]) -> list[Any | Timeout | Crash | Unavailable]:
        """The function's result for each argument list, in order, or the fault in its place; raises for neither."""
        messages = [json.dumps({"id": index, "arguments": list(task)}).encode() + b"\n" for index, task in enumerate(tasks)]
        job = _Job(messages)
        with self._exclusive():
            try:
                while job.open:
                    self._staff(len(job.waiting))
                    self._hand_out(job)
                    self._collect(job)
            finally:  # an interrupt must not leave answers to this job for the next one to read
                self._stop([worker for worker in self._crew if worker.task is not None])
            self._staff(self._strength)  # those that died get ready while nobody waits for them
        self._count(job)
        return [job.outcomes[index] for index in range(len(tasks))]

    def warm_up(self) -> None:
        """Start every worker and wait until each is ready; raises RewardFailure when none can be started."""
        with self._exclusive():
            self._staff(self.workers)
            while self._crew and not all(worker.ready for worker in self._crew):
                self._collect(_Job([]))
                self._staff(self.workers)
            if not self._crew:
                raise RewardFailure(self._why_none())

    def pids(self) -> list[int]:
        """The process ids of the workers that are there."""
        return [worker.process.pid for worker in self._crew]

    def close(self) -> None:
        """End all workers; a later use starts new ones."""
        with self._exclusive():
            self._strength = 0
            self._stop(list(self._crew))

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._crew: list[_Worker] = []
        self._strength = 0
        self._failed_starts = 0
        self._start_error = ""
        self._finalizer = weakref.finalize(self, _stop_all, self._crew, self._owner)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One caller at a time. After a fork of the trainer the child gets workers of its own."""
        if os.getpid() != self._owner:
            self._finalizer.detach()
            self._reset()
        with self._lock:
            self._failed_starts = 0
            yield

    def _staff(self, wanted: int) -> None:
        """Replace workers that died while idle, and start as many as there is work for."""
        self._stop([worker for worker in self._crew if worker.idle and worker.process.poll() is not None])
        busy = sum(worker.task is not None for worker in self._crew)
        while len(self._crew) < min(self.workers, wanted + busy) and self._failed_starts < START_ATTEMPTS:
            try:
                self._crew.append(self._start())
            except OSError as error:
                self._failed_start(f"{type(error).__name__}: {error}")
        self._strength = max(self._strength, len(self._crew))

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        lifeline, its_end = socket.socketpair()
        settings = {
            "entry": self.entry,
            "parent": os.getpid(),
            "lifeline": its_end.fileno(),
            "path": sys.path,
            "timeout_s": self.timeout_s,
            "memory_bytes": self.memory_bytes,
            "max_bytes": MAX_MESSAGE_BYTES,
            "warm_up": self.warm_up_arguments,
        }
        environment = {key: value for key, value in os.environ.items() if key in _ENVIRONMENT or key.startswith("PYTHON")}
        # Results must not depend on the order in which a worker happens to iterate a set of strings.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
            process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER_FILE), json.dumps(settings)],
                stdin=theirs.fileno(),
                stdout=log.fileno(),
                stderr=log.fileno(),
                env=environment,
                process_group=0,
                pass_fds=[its_end.fileno()],
            )
        except OSError:
            for end in (ours, lifeline, log):
                end.close()
            raise
        finally:
            theirs.close()
            its_end.close()
        self.counts["started"] += 1
        return _Worker(process, ours, lifeline, log, time.monotonic() + self.start_timeout_s)

    def _failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        self._start_error = reason
        time.sleep(0.05 * 2**self._failed_starts)

    def _hand_out(self, job: _Job) -> None:
        if not self._crew:
            for index in job.waiting:
                job.outcomes[index] = Unavailable(self._why_none())
            job.waiting.clear()
        for worker in [worker for worker in self._crew if worker.idle]:
            if not job.waiting:
                return
            index = job.waiting.popleft()
            job.attempts[index] += 1
            if not worker.send(index, job.messages[index], self.timeout_s):
                self._lost(worker, job)
                return

    def _collect(self, job: _Job) -> None:
        """Wait for the next answer or deadline, and act on it."""
        waited_for = [worker for worker in self._crew if not worker.idle]
        if not waited_for:
            return
        patience = min(worker.deadline for worker in waited_for) - time.monotonic()
        answered = wait([worker.channel for worker in waited_for], max(0.0, patience))
        for worker in waited_for:
            if worker.channel in answered:
                self._read(worker, job)
        now = time.monotonic()
        for worker in [worker for worker in self._crew if not worker.idle and worker.deadline <= now]:
            self._overdue(worker, job)

    def _read(self, worker: _Worker, job: _Job) -> None:
        try:
            reply = worker.receive()
        except EOFError:
            self._lost(worker, job)
            return
        if reply is None:
            return
        if not worker.ready:
            worker.ready = True
            self._failed_starts = 0
        elif worker.task is not None and reply.get("id") == worker.task:
            job.outcomes[worker.task] = Crash(reply["error"]) if "error" in reply else reply.get("value")
            worker.task = None
            if reply.get("tired"):
                self._stop([worker])

    def _lost(self, worker: _Worker, job: _Job) -> None:
        """A worker is gone: before it was ready that is the machine's fault, on a task perhaps the task's."""
        words = worker.last_words()
        index = worker.task
        self._stop([worker])
        if index is None:
            self._failed_start(words)
        elif job.attempts[index] < TASK_ATTEMPTS:
            job.waiting.appendleft(index)
            # What killed one may have killed all: the second attempt goes to a worker that is known to live.
            self._stop([worker for worker in self._crew if worker.idle])
        else:
            job.outcomes[index] = Crash(f"the worker process died {TASK_ATTEMPTS} times, at last: {words}")

    def _overdue(self, worker: _Worker, job: _Job) -> None:
        index = worker.task
        self._stop([worker])
        if index is None:
            self._failed_start(f"not ready after {self.start_timeout_s:g} s")
        else:
            job.outcomes[index] = Timeout(f"took more than {self.timeout_s:g} s")

    def _stop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._crew.remove(worker)
            worker.stop()

    def _why_none(self) -> str:
        return (
            f"no verifier process for {self.entry!r} could be started in {START_ATTEMPTS} attempts "
            f"(at last: {self._start_error or 'no reason known'}). Check that {sys.executable} can import it, and that "
            f"memory_bytes={self.memory_bytes} and start_timeout_s={self.start_timeout_s:g} are enough for that."
        )

    def _count(self, job: _Job) -> None:
        self.counts["tasks"] += len(job.outcomes)
        for outcome in job.outcomes.values():
            if isinstance(outcome, Fault):
                self.counts[type(outcome).__name__.lower()] += 1


def _exit_text(code: int | None) -> str:
    if code is None:
        return "no answer"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stop_all(crew: list[_Worker], owner: int) -> None:
    """End the workers of a pool that is forgotten, or of a process that exits; a fork must not end its parent's."""
    if os.getpid() == owner:
        for worker in crew:
            worker.stop()
