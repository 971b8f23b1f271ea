"""A process that has loaded a verifier and forks worker processes from itself, and those workers seen from the parent.

Loading computer algebra takes seconds on a busy machine; a fork of a process that has done so takes milliseconds. So the
place of a worker that had to be killed is filled at once, however many of them must be.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rl4llm.core.redact import short_environment

MAX_MESSAGE_BYTES = 64 * 1024
END_TIMEOUT_S = 10.0
_ENDING = struct.Struct("2id")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORKER_FILE = Path(__file__).with_name("_worker.py")


@dataclass(eq=False, slots=True)
class WorkerProcess:
    """The socket to one worker process, and what it is doing. `task` is the index of the task under way.

    `used_s` is the processor time that it had used when the task was handed over.
    """

    number: int
    channel: socket.socket
    deadline: float
    pid: int | None = None  # known once it is ready
    task: int | None = None
    used_s: float = 0.0
    inbox: bytearray = field(default_factory=bytearray)

    @property
    def idle(self) -> bool:
        return self.pid is not None and self.task is None

    def send(self, task: int, message: bytes, timeout_s: float) -> bool:
        """Hand a task over; False when the process is gone or does not read."""
        self.task = task
        _, self.used_s = self._usage()
        self.deadline = time.monotonic() + timeout_s
        try:
            self.channel.settimeout(timeout_s)
            self.channel.sendall(message)
        except OSError:
            return False
        return True

    def starved_of(self, processor_s: float) -> float:
        """Return the part of that processor time that its task still lacks; 0 if the process does not want to run.

        A process that sleeps or is stopped lacks nothing, whatever it has used, and so does every one without /proc.
        """
        state, used_s = self._usage()
        return max(0.0, processor_s - (used_s - self.used_s)) if state in ("R", "D") else 0.0

    def _usage(self) -> tuple[str, float]:
        """Return the state of the process and its processor time in seconds, from /proc."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0.0
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def receive(self) -> dict[str, Any] | None:
        """Return a whole message if there is one; raise EOFError when there will never be one."""
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


class ForkServer:
    """The process that forks workers, started at the first `fork` and, after `close`, at the next.

    It and its workers form a process group that shares one socket, the lifeline. Nothing is ever written to that: all of
    them end when this side of it is closed, also by the end of this process.
    """

    def __init__(self, settings: Mapping[str, Any], start_timeout_s: float):
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._workers: list[WorkerProcess] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._forked = 0
        self._ended: WorkerProcess | None = None
        self._loaded = False

    @property
    def died(self) -> bool:
        """Whether the process ended, which leaves workers that nobody can end but by `close`."""
        return self._process is not None and self._process.poll() is not None

    def fork(self) -> WorkerProcess:
        """Order a worker, which becomes ready in its own time; raises OSError."""
        if self._process is None:
            self._start()
        ours, theirs = socket.socketpair()
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
            socket.send_fds(self._control, [struct.pack("i", self._forked + 1)], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._forked += 1
        worker = WorkerProcess(self._forked, ours, time.monotonic() + self._start_timeout_s)
        self._workers.append(worker)
        return worker

    def end(self, worker: WorkerProcess) -> None:
        """Order that a worker be killed and reaped, and wait for neither: on a busy machine both take long."""
        self._workers.remove(worker)
        worker.channel.close()
        self._loaded = self._loaded or worker.pid is not None
        self._ended = worker
        try:
            # Read the answers that nobody waited for.
            while wait([self._control], 0) and self._control.recv(_ENDING.size):
                pass
            self._control.sendall(struct.pack("i", -worker.number))
        except OSError:
            self._kill()

    def ending(self, worker: WorkerProcess) -> tuple[str, float]:
        """Wait until the worker that was ended last is gone; return how it ended, for messages, and its processor time."""
        self._ended = None
        number = 0
        try:
            while number != -worker.number:
                number, status, used_s = _ENDING.unpack(self._control.recv(_ENDING.size))
        except (OSError, struct.error):
            self._kill()
            return _exit_text(None), 0.0
        return _exit_text(os.waitstatus_to_exitcode(status)), used_s

    def close(self) -> None:
        """End all processes; `fork` starts new ones."""
        if self._process is None:
            return
        if self._loaded or any(worker.pid for worker in self._workers):  # else it reads no orders yet
            for worker in list(self._workers):
                self.end(worker)
            if self._ended is not None:
                self.ending(self._ended)
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        self._control.close()
        self._lifeline.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._log.close()
        self._process = self._ended = None
        self._loaded = False

    def last_words(self) -> str:
        """Say how the process that forks ended, and the end of what it printed."""
        if self._process is None:
            return "it was closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._log.seek(0)
        lines = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"{_exit_text(self._process.poll())}{': ' + lines[-1] if lines else ''}"

    def _kill(self) -> None:
        assert self._process is not None  # it was asked for a worker
        self._process.kill()

    def _start(self) -> None:
        self._control, its_control = socket.socketpair()
        self._lifeline, its_lifeline = socket.socketpair()
        self._control.settimeout(END_TIMEOUT_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        settings = {**self._settings, "parent": os.getpid(), "lifeline": its_lifeline.fileno()}
        # Python ignores others, too
        settings["path"] = [entry for entry in sys.path if isinstance(entry, str)]
        environment = short_environment()
        # Results must not depend on the order in which a worker happens to iterate a set of strings.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER_FILE), json.dumps(settings)],
                stdin=its_control.fileno(),
                stdout=self._log.fileno(),
                stderr=self._log.fileno(),
                env=environment,
                process_group=0,
                pass_fds=[its_lifeline.fileno()],
            )
        except OSError:
            for end in (self._control, self._lifeline, self._log):
                end.close()
            raise
        finally:
            its_control.close()
            its_lifeline.close()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "no answer"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
