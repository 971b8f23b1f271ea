"""Worker processes for verifiers that may hang, crash or eat memory on what a model wrote.

Parsers and computer algebra never see a model's text in the trainer's process. They run in a few preloaded workers, one
task at a time each; the parent owns the time limit, kills what exceeds it, and takes another worker. What comes back
tells whose fault it was: `Timeout` and `Crash` are the text's, `Unavailable` is the machine's. A worker that is kept from
running, because other processes take the processors, gets more time: a busy machine is not the text's fault either.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import wait
from typing import Any

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.rewards.fork_server import MAX_MESSAGE_BYTES, ForkServer, WorkerProcess

START_ATTEMPTS = 3
TASK_ATTEMPTS = 2
USED_SHARE = 0.5  # of the time limit: a task that used less processor time was slowed down by the machine
PATIENCE = 5 / 3  # time limits that a task may take on a busy machine: 2.5 s where the limit is 1.5 s
MAX_REMEMBERED = 100_000


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
    """No worker could be started, or it was not let run: nobody's text is to blame."""


@dataclass(slots=True)
class _Tasks:
    """The tasks of one `map`: which still wait, how often each was tried, what came of each.

    `started` has the time of the first attempt at each, `used_s` the processor time of attempts that failed.
    """

    arguments: list[bytes]
    outcomes: dict[int, Any] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    waiting: deque[int] = field(default_factory=deque)
    started: dict[int, float] = field(default_factory=dict)
    used_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        for index in range(len(self.arguments)):
            size = len(self.message(index))
            if size > MAX_MESSAGE_BYTES:
                self.outcomes[index] = Crash(f"the task has {size} bytes, accepted are {MAX_MESSAGE_BYTES}")
            else:
                self.waiting.append(index)

    @property
    def open(self) -> bool:
        return len(self.outcomes) < len(self.arguments)

    def message(self, index: int) -> bytes:
        return b'{"id": %d, "arguments": %b}\n' % (index, self.arguments[index])

    def key(self, index: int) -> bytes:
        """Return a short name of what is asked, the same in every job."""
        return blake2b(self.arguments[index], digest_size=16).digest()


class VerifierPool:
    """Preloaded worker processes that run one function.

        >>> pool = VerifierPool("operator:add")
        >>> pool.map([[1, 2], ["a", 3]])
        [3, Crash(reason='TypeError: can only concatenate str (not "int") to str')]

    Args:
        entry: the function, as ``package.module:function`` or ``/path/to/file.py:function``. It takes and returns JSON
            values. A file by path is imported without its package, which keeps the workers light.
        workers: processes, each with one task at a time.
        timeout_s: time limit of one task, both attempts together. The worker is killed then, and another takes its place.
            One that has used less than half of it as processor time, while it wanted to run, gets up to 5/3 of the limit.
        memory_bytes: address space of one worker; allocating more raises MemoryError inside it.
        start_timeout_s: how long the import of what the function needs may take.
        warm_up: argument lists that are run once before any worker starts, so that its first task is not slow.

    One process imports the function at the first use and forks the workers; one more is kept in reserve for the place of
    a worker that is killed. `map` may be called from any thread and inside an event loop; it blocks. A worker that dies on
    a task is replaced and the task tried once more, so that a process killed from outside costs nothing. A task that took
    too long is not tried again for as long as the pool lives: its `Timeout` is remembered. All processes end with their
    parent, whatever ends it. `counts` has totals: tasks, timeout, remembered, crash, unavailable, started.
    """

    @checked("VerifierPool")
    def __init__(
        self,
        entry: str,
        *,
        workers: Count = 2,
        timeout_s: Positive = 2.0,
        memory_bytes: Count = 1024**3,
        start_timeout_s: Positive = 60.0,
        warm_up: Sequence[Sequence[Any]] = (),
    ):
        self.entry = entry
        self.workers = workers
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.start_timeout_s = start_timeout_s
        self.warm_up_arguments = [list(arguments) for arguments in warm_up]
        self.counts: Counter[str] = Counter()
        self._timeouts: dict[bytes, Timeout] = {}
        self._reset()

    def map(self, tasks: Sequence[Sequence[Any]]) -> list[Any | Timeout | Crash | Unavailable]:
        """Return the function's result or the fault for each argument list, in order."""
        job = _Tasks([json.dumps(list(task)).encode() for task in tasks])
        with self._exclusive():
            self._remember(job)
            try:
                while job.open:
                    self._staff(job)
                    self._hand_out(job)
                    self._collect(job)
            finally:  # an interrupt must not leave answers to this job for the next one to read
                self._stop([worker for worker in self._crew if worker.task is not None])
            self._staff(job, self._strength)  # replacements get ready while no caller waits
            self.counts["tasks"] += len(job.outcomes)
            faults = (outcome for outcome in job.outcomes.values() if isinstance(outcome, Fault))
            self.counts.update(type(fault).__name__.lower() for fault in faults)
        return [job.outcomes[index] for index in range(len(tasks))]

    def warm_up(self) -> None:
        """Start every worker and wait until each is ready; raises RewardFailure when none can be started."""
        nothing = _Tasks([])
        with self._exclusive():
            self._staff(nothing, self.workers)
            while self._crew and not all(worker.pid for worker in self._crew):
                self._collect(nothing)
                self._staff(nothing, self.workers)
            if not self._crew:
                raise RewardFailure(self._why_none())

    def pids(self) -> list[int]:
        """Wait until all workers are ready and return their process ids, without that of the one in reserve."""
        nothing = _Tasks([])
        with self._exclusive():
            while not all(worker.pid for worker in self._crew):
                self._collect(nothing)
            return [worker.pid for worker in self._crew if worker.pid]

    def close(self) -> None:
        """End all workers; a later use starts new ones."""
        with self._exclusive():
            self._strength = 0
            self._dismiss_all(_Tasks([]))

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        settings = {
            "entry": self.entry,
            "longest_s": PATIENCE * self.timeout_s,
            "memory_bytes": self.memory_bytes,
            "max_bytes": MAX_MESSAGE_BYTES,
            "warm_up": self.warm_up_arguments,
        }
        self._server = ForkServer(settings, self.start_timeout_s)
        self._crew: list[WorkerProcess] = []
        self._reserve: WorkerProcess | None = None
        self._strength = 0
        self._failed_starts = 0
        self._start_error = ""
        self._finalizer = weakref.finalize(self, _close, self._server, self._owner)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Admit one caller at a time. After a fork of the trainer, the child starts its own workers."""
        if os.getpid() != self._owner:
            self._finalizer.detach()
            self._reset()
        with self._lock:
            self._failed_starts = 0
            yield

    def _remember(self, job: _Tasks) -> None:
        """Settle the tasks that took too long before."""
        while len(self._timeouts) > MAX_REMEMBERED:
            del self._timeouts[next(iter(self._timeouts))]
        for index in list(job.waiting) if self._timeouts else ():
            if timeout := self._timeouts.get(job.key(index)):
                job.outcomes[index] = timeout
                job.waiting.remove(index)
                self.counts["remembered"] += 1

    def _staff(self, job: _Tasks, least: int = 0) -> None:
        """Replace workers that died while idle, and start as many as there is work for, or at least `least`."""
        if self._server.died:
            self._dismiss_all(job)
        idle = [worker for worker in self._crew if worker.idle]
        ended = wait([worker.channel for worker in idle], 0)
        self._stop([worker for worker in idle if worker.channel in ended])
        busy = sum(worker.task is not None for worker in self._crew)
        wanted = min(self.workers, max(least, len(job.waiting)) + busy)
        while len(self._crew) < wanted and self._failed_starts < START_ATTEMPTS:
            try:
                worker, self._reserve = self._reserve or self._server.fork(), None
            except OSError as error:
                self._failed_start(f"{type(error).__name__}: {error}")
                continue
            worker.deadline = time.monotonic() + self.start_timeout_s
            self.counts["started"] += 1
            self._crew.append(worker)
        self._strength = max(self._strength, len(self._crew))
        if self._crew and self._reserve is None:
            with contextlib.suppress(OSError):  # the next attempt to start a worker tells why
                self._reserve = self._server.fork()

    def _failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        self._start_error = reason
        time.sleep(0.05 * 2**self._failed_starts)

    def _hand_out(self, job: _Tasks) -> None:
        if not self._crew:
            for index in job.waiting:
                job.outcomes[index] = Unavailable(self._why_none())
            job.waiting.clear()
        for worker in [worker for worker in self._crew if worker.idle]:
            if not job.waiting:
                return
            index = job.waiting.popleft()
            job.attempts[index] += 1
            started = job.started.setdefault(index, time.monotonic())
            left_s = max(0.001, started + self.timeout_s - time.monotonic())
            if not worker.send(index, job.message(index), left_s):
                self._lost(worker, job)
                return

    def _collect(self, job: _Tasks) -> None:
        """Wait for the next answer or deadline, and act on it."""
        waited_for = [worker for worker in self._crew if not worker.idle]
        if not waited_for:
            return
        patience = min(worker.deadline for worker in waited_for) - time.monotonic()
        answered = wait([worker.channel for worker in waited_for], max(0.0, patience))
        for worker in waited_for:
            if worker in self._crew and worker.channel in answered:
                self._read(worker, job)
        now = time.monotonic()
        for worker in waited_for:
            if worker in self._crew and not worker.idle and worker.deadline <= now:
                if worker.task is None:  # the process that forks hangs
                    self._start_over(f"not ready after {self.start_timeout_s:g} s", job)
                # It may have answered while this process was kept from running.
                elif not wait([worker.channel], 0):
                    self._out_of_time(worker, worker.task, job)

    def _read(self, worker: WorkerProcess, job: _Tasks) -> None:
        try:
            reply = worker.receive()
        except EOFError:
            self._lost(worker, job)
            return
        if reply is None:
            return
        if worker.pid is None:
            worker.pid = reply["ready"]
            self._failed_starts = 0
        elif worker.task is not None and reply.get("id") == worker.task:
            job.outcomes[worker.task] = Crash(reply["error"]) if "error" in reply else reply.get("value")
            worker.task = None
            if reply.get("tired"):
                self._stop([worker])

    def _lost(self, worker: WorkerProcess, job: _Tasks) -> None:
        """Handle the loss of a worker: before it was ready, the machine is at fault, on a task perhaps the task."""
        index = worker.task
        self._stop([worker])
        words, used_s = self._server.ending(worker)
        if index is None:
            self._start_over(self._server.last_words(), job)
        elif job.attempts[index] < TASK_ATTEMPTS:
            job.waiting.appendleft(index)
            job.used_s[index] += max(0.0, used_s - worker.used_s)
            # What killed one may have killed all: the second attempt goes to a worker that is known to live.
            self._stop([worker for worker in self._crew if worker.idle])
            if self._reserve is not None:
                self._server.end(self._reserve)
                self._reserve = None
        else:
            job.outcomes[index] = Crash(f"the worker process died {TASK_ATTEMPTS} times, at last: {words}")

    def _out_of_time(self, worker: WorkerProcess, index: int, job: _Tasks) -> None:
        """Give a task more time when its worker was kept from running; else end it."""
        lacks_s = worker.starved_of(USED_SHARE * self.timeout_s - job.used_s[index])
        now, latest = time.monotonic(), job.started[index] + PATIENCE * self.timeout_s
        if lacks_s and now < latest:
            worker.deadline = min(latest, now + max(0.02, lacks_s))
            return
        if lacks_s:
            took, used = now - job.started[index], USED_SHARE * self.timeout_s - lacks_s
            reason = f"a verifier process got {used:.2f} s of processor time in {took:.1f} s. Run less on this machine."
            job.outcomes[index] = Unavailable(reason)
        else:
            job.outcomes[index] = timeout = Timeout(f"took more than {self.timeout_s:g} s")
            if job.attempts[index] == 1:  # else a process that was killed from outside may have cost the time
                self._timeouts[job.key(index)] = timeout
        self._stop([worker])

    def _start_over(self, reason: str, job: _Tasks) -> None:
        """End everything after a start that failed."""
        self._dismiss_all(job)
        self._failed_start(reason)

    def _stop(self, workers: list[WorkerProcess]) -> None:
        """End some of the workers."""
        for worker in workers:
            self._crew.remove(worker)
            self._server.end(worker)

    def _dismiss_all(self, job: _Tasks) -> None:
        """End all processes; the tasks under way wait for others."""
        job.waiting.extendleft(worker.task for worker in self._crew if worker.task is not None)
        self._crew.clear()
        self._reserve = None
        self._server.close()

    def _why_none(self) -> str:
        return (
            f"no verifier process for {self.entry!r} could be started in {START_ATTEMPTS} attempts "
            f"(at last: {self._start_error or 'no reason known'}). Check that {sys.executable} can import it, and that "
            f"memory_bytes={self.memory_bytes} and start_timeout_s={self.start_timeout_s:g} are enough for that."
        )


def _close(server: ForkServer, owner: int) -> None:
    """End the processes of a pool that is forgotten, or of a process that exits; a fork must not end its parent's."""
    if os.getpid() == owner:
        server.close()
