"""Worker processes for verifiers that may hang, crash or eat memory on what a model wrote.

Parsers and computer algebra never see a model's text in the trainer's process. A server process imports the verifier once
and forks workers, which pebble supervises. Trainer and server exchange lines of JSON, so the trainer unpickles nothing.
What comes back tells whose fault it was: `Timeout` and `Crash` are the text's, `Unavailable` is the machine's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.redact import short_environment
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.runtime.gpus import VISIBLE

START_ATTEMPTS = 3
RETRIES = {"died": 1, "full": 20}
PATIENCE = 4  # time limits that a task may take on a busy machine: 6 s where the limit is 1.5 s
SILENCE_S = 15.0  # beyond the longest task: a server that sends nothing for so long hangs
MAX_BYTES = 64 * 1024
MAX_REMEMBERED = 10_000
MAX_TASKS = 2000  # of one worker
_FULL = 77  # exit code of a worker whose memory is too full for one more task
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1])[0]; from {__name__} import serve; serve()"
# Results must not depend on the order in which a worker happens to iterate a set of strings.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    VISIBLE: "",
    "MALLOC_ARENA_MAX": "1",
}


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


_FAULTS = {"timeout": Timeout, "crash": Crash, "died": Crash, "full": Unavailable, "unavailable": Unavailable}


class VerifierPool:
    """Worker processes that run one function.

        >>> pool = VerifierPool("operator:add")
        >>> pool.map([[1, 2], ["a", 3]])
        [3, Crash(reason='TypeError: can only concatenate str (not "int") to str')]

    Args:
        entry: the function, as ``package.module:function`` or ``/path/to/file.py:function``. It takes and returns JSON
            values. A file by path is imported without its package, which keeps the workers light.
        workers: processes, each with one task at a time.
        timeout_s: time limit of one attempt; then the worker is killed. Time in which it waits for a processor does not
            count; a task that needs more than four times the limit with that time is `Unavailable`.
        memory_bytes: address space of one worker; allocating more raises MemoryError inside it.
        start_timeout_s: how long the import of what the function needs may take.
        warm_up: argument lists that are run once before any worker starts, so that its first task is not slow.

    `map` may be called from any thread and inside an event loop; it blocks. A task whose worker dies is tried once more, so
    that a process killed from outside costs nothing. A `Timeout` is remembered and not computed again. All processes end
    with their parent, whatever ends it. `counts` has totals: tasks, timeout, remembered, crash, unavailable, started.
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
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.counts: Counter[str] = Counter()
        self._settings = [entry, workers, memory_bytes, warm_up]
        self._timeouts: dict[str, Timeout] = {}
        self._server = _Server()
        weakref.finalize(self, self._server.close)

    def map(self, tasks: Sequence[Sequence[Any]]) -> list[Any | Timeout | Crash | Unavailable]:
        """Return the function's result or the fault for each argument list, in order."""
        texts = [json.dumps(list(task)) for task in tasks]
        with self._exclusive():
            timeouts, outcomes = self._timeouts, dict[int, Any]()
            waiting = {index: text for index, text in enumerate(texts) if text not in timeouts}
            for index, text in list(waiting.items()):
                if len(text) > MAX_BYTES:
                    outcomes[index] = Crash(
                        f"the task has {len(waiting.pop(index))} bytes, accepted are {MAX_BYTES}"
                    )
            if waiting:
                self._run(waiting, outcomes)
            self.counts["remembered"] += len(tasks) - len(outcomes)
            timeouts |= {
                texts[index]: fault for index, fault in outcomes.items() if isinstance(fault, Timeout)
            }
            outcomes = {
                index: timeouts[text] for index, text in enumerate(texts) if text in timeouts
            } | outcomes
            for text in list(timeouts)[:-MAX_REMEMBERED]:
                del timeouts[text]
            faults = [outcome for outcome in outcomes.values() if isinstance(outcome, Fault)]
            self.counts.update(type(fault).__name__.lower() for fault in faults)
            self.counts["tasks"] += len(tasks)
        return [outcomes[index] for index in range(len(tasks))]

    def warm_up(self) -> None:
        """Start the server and wait until it is ready; raises RewardFailure when it cannot be started."""
        with self._exclusive():
            if reason := self._run({}, {}):
                raise RewardFailure(reason)

    def close(self) -> None:
        """End all processes; a later use starts new ones."""
        with self._exclusive():
            self._server.close()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Admit one caller at a time. After a fork of the trainer, the child starts another server."""
        if self._server.owner != os.getpid():
            self._server = _Server()
            weakref.finalize(self, self._server.close)
        with self._server.lock:
            yield

    def _run(self, waiting: dict[int, str], outcomes: dict[int, Any]) -> str:
        """Move each task from `waiting` to `outcomes`; return why no server could be started, or an empty text."""
        failures = 0
        while True:
            before = len(waiting)
            try:
                if self._server.process is None:
                    self.counts["started"] += 1
                    self._server.start(self._settings, self.start_timeout_s)
                self._exchange(waiting, outcomes)
                return ""
            except OSError as error:
                self._server.close()
                failures = 1 if len(waiting) < before else failures + 1
                if failures == START_ATTEMPTS:
                    reason = (
                        f"no verifier process for {self._settings[0]!r} works in {START_ATTEMPTS} attempts: {error}. "
                        f"Check that {sys.executable} can import it, and raise memory_bytes or start_timeout_s."
                    )
                    outcomes |= {index: Unavailable(reason) for index in waiting}
                    return reason
                time.sleep(0.05 * 2**failures)
            except BaseException:  # an interrupt: no answer may be left for the next caller to read
                self._server.close()
                raise

    def _exchange(self, waiting: dict[int, str], outcomes: dict[int, Any]) -> None:
        """Send the tasks and receive what came of them; raises OSError when the server is gone or hangs."""
        longest_s = PATIENCE * self.timeout_s
        attempts = dict.fromkeys(waiting, 0)
        queue = list(waiting)
        while waiting:
            for index in queue:
                self._server.send(f"[{index}, {self.timeout_s}, {longest_s}, {waiting[index]}]\n")
            index, kind, value = self._server.receive(longest_s + SILENCE_S)
            attempts[index] += 1
            queue = [index] if attempts[index] <= RETRIES.get(kind, 0) else []
            if not queue:
                outcomes[index] = _FAULTS[kind](value) if kind in _FAULTS else value
                del waiting[index]


class _Server:
    """The process that forks workers, with the socket to it; `serve` is what it runs."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, settings: list[Any], timeout_s: float) -> None:
        """Start the process and wait until it has loaded the verifier; raises OSError."""
        path = [item for item in sys.path if isinstance(item, str)]  # Python ignores others, too
        command = [sys.executable, "-P", "-c", _START, json.dumps([path, os.getpid(), *settings])]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._socket, its_socket = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        with its_socket:
            self.process = subprocess.Popen(
                command,
                stdin=its_socket.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=short_environment() | _ENVIRONMENT,
                process_group=0,  # Ctrl-C in a terminal is the trainer's to handle, and `close` ends the whole group
            )
        self.receive(timeout_s)

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode())

    def receive(self, timeout_s: float) -> Any:
        """Return the next message; raises OSError when none comes in that time, or ever."""
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        if not line.endswith(b"\n"):
            self._log.seek(0)
            printed = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
            raise ConnectionError(printed[-1] if printed else "it was killed")
        return json.loads(line)

    def close(self) -> None:
        """End the process and its workers, unless they belong to the trainer that this process is a fork of."""
        if self.process is None or self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):  # they are gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for end in (self._lines, self._socket, self._log):
            end.close()
        self.process = None


def serve() -> None:
    """Load the verifier and run tasks until the trainer is gone: the body of the server process."""
    _, parent, entry, workers, memory_bytes, warm_up = json.loads(sys.argv[1])
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses to limit the address space
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    channel = socket.socket(fileno=os.dup(0))
    for arguments in warm_up:
        _load(entry)(*arguments)
    _load(entry)
    gc.freeze()  # a collection in a worker would copy the pages that it shares
    for descriptor in (0, 1, 2):  # what libraries printed so far tells the trainer why a start failed
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    full = (_address_space() + memory_bytes) // 2
    pool = ProcessPool(workers, MAX_TASKS, _start_worker, [channel], get_context("fork"))
    sending = threading.Lock()

    def report(index: int, limit_s: float, future: Future[list[Any]]) -> None:
        with sending:
            channel.sendall(json.dumps([index, *_result(future, limit_s)]).encode() + b"\n")

    channel.sendall(b"[]\n")
    for line in channel.makefile("rb"):
        index, limit_s, longest_s, arguments = json.loads(line)
        future = pool.schedule(_work, [entry, arguments, limit_s, full], timeout=longest_s)
        future.add_done_callback(partial(report, index, limit_s))
    os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """End all processes once the trainer is gone, also when a fork of it keeps the other end of the socket open."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _result(future: Future[list[Any]], limit_s: float) -> list[Any]:
    """Return the kind and the value of a task's result."""
    try:
        return future.result()
    except TimeoutError:
        return ["unavailable", "a verifier process was kept from running. Run less on this machine."]
    except ProcessExpired as error:
        if error.exitcode == -signal.SIGPROF:
            return ["timeout", f"took more than {limit_s:g} s"]
        ending = signal.Signals(-error.exitcode).name if error.exitcode < 0 else f"exit code {error.exitcode}"
        return ["full" if error.exitcode == _FULL else "died", f"its process ended with {ending}"]
    except BaseException:  # such as all workers were killed while they were idle: the trainer starts over
        os.killpg(0, signal.SIGKILL)
        raise


@cache  # a worker inherits what the server loaded
def _load(entry: str) -> Callable[..., Any]:
    """Import the function behind ``package.module:function`` or ``/path/to/file.py:function``."""
    module_name, _, attribute = entry.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), attribute)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None and spec.loader is not None  # there is one for whatever ends in .py
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _start_worker(channel: socket.socket) -> None:
    os.close(channel.detach())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for the end of a C call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _work(entry: str, arguments: list[Any], limit_s: float, full: int) -> list[Any]:
    """Run one task in a worker; return the kind and the value of its result."""
    if _address_space() > full:
        os._exit(_FULL)
    start = time.monotonic() - _queued_s()

    def look(*_: Any) -> None:
        left_s = limit_s - (time.monotonic() - _queued_s() - start)
        signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.01))
        if left_s <= 0:
            os.kill(os.getpid(), signal.SIGPROF)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends also a C call that holds the interpreter
    try:
        value = _load(entry)(*arguments)
        if (size := len(json.dumps(value))) > MAX_BYTES // 2:
            raise ValueError(f"the result has {size} bytes, accepted are {MAX_BYTES // 2}")
    except BaseException as error:  # noqa: BLE001 - what the verifier makes of the model's text is a result, not a fault
        return ["crash", f"{type(error).__name__}: {str(error)[:500]}"]
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
    return ["value", value]


def _queued_s() -> float:
    """Return for how long this process was ready to run and got no processor; 0 where Linux does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _address_space() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0
