"""Supervise a command, such as a server or an agent, so that none of its processes outlives it or its launcher.

    python supervise.py LAUNCHER_PID GRACE_S COMMAND ...

It starts the command in a separate process group and waits for the first of three events: the command ends, the launcher
asks it to stop (SIGTERM), or the launcher is gone, killed with -9 perhaps. Then it asks the command to end, and kills it
after GRACE_S, or earlier when the launcher sends SIGINT after the first signal. It does the same with all processes that
the command started. On Linux a process whose parent died becomes a child of this one, so none can escape. It exits with the
command's exit code, and inherits the launcher's standard streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

SUPERVISE = Path(__file__).resolve()  # absolute, so that it works from any directory
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # of prctl(2)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
LOOK_S = 0.2  # how often to check that the launcher is alive
GIVE_UP_S = 30.0  # a process that hangs in a kernel driver cannot be killed
LAST_LINES, TAIL_BYTES = 40, 65536  # of the log of a process that ended
LONGEST_LINE = 400  # SGLang prints all its options in one line of 20,000 characters


class Bell:
    """Ends a wait as soon as a signal arrives, and remembers whether one asked to stop."""

    def __init__(self) -> None:
        self.stop_asked = self.at_once = False
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)

    def wait(self, seconds: float) -> None:
        """Return after a signal, or after `seconds`."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)

    def _ask(self, number: int, _: object) -> None:
        self.at_once = self.at_once or (self.stop_asked and number == signal.SIGINT)
        self.stop_asked = True


class Family:
    """The command and all processes that it started."""

    def __init__(self, command: Sequence[str]):
        if LIBC is not None:
            LIBC.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
        self._self = psutil.Process()
        self._known: set[psutil.Process] = set()
        self.exit_code: int | None = None
        # Nothing else runs in this process, so code between fork and exec is safe here.
        self._first = subprocess.Popen(
            command, process_group=0, preexec_fn=lambda: end_with_parent(signal.SIGKILL)
        )

    def runs(self) -> bool:
        """Return whether the command itself runs; reap every process that ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._first.pid:
                    self.exit_code = os.waitstatus_to_exitcode(ended[1])
        return self.exit_code is None

    def ask(self) -> None:
        """Ask the command to end."""
        self._known.update(self._self.children(recursive=True))
        os.kill(self._first.pid, signal.SIGTERM)

    def kill(self) -> bool:
        """Kill all processes that are left; return whether there were any."""
        self._known.update(self._self.children(recursive=True))
        running = [process for process in self._known if process.is_running()]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.runs()
        return bool(running)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Make this process receive a signal when its parent dies, even by SIGKILL; only Linux supports this."""
    if LIBC is not None:
        LIBC.prctl(PARENT_DEATH_SIGNAL, number, 0, 0, 0)


def supervise(launcher_pid: int, grace_s: float, command: Sequence[str]) -> int:
    """Run `command` until it ends or should stop; return its exit code, 128 plus the number for a signal."""
    bell = Bell()
    family = Family(command)
    while family.runs() and not bell.stop_asked and os.getppid() == launcher_pid:
        bell.wait(LOOK_S)
    if family.exit_code is None:
        family.ask()
        deadline = time.monotonic() + grace_s
        while family.runs() and not bell.at_once and time.monotonic() < deadline:
            bell.wait(LOOK_S)
    deadline = time.monotonic() + GIVE_UP_S
    while family.kill() and time.monotonic() < deadline:
        bell.wait(0.02)
    code = -signal.SIGKILL if family.exit_code is None else family.exit_code
    return code if code >= 0 else 128 - code


def supervised(command: Sequence[str], grace_s: float) -> list[str]:
    """Return the words that run a command under this file, which ends it with this process."""
    return [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(grace_s), *command]


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    grace_s: float,
    *,
    directory: Path | None = None,
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a supervised process in a separate session, so that Ctrl-C in a terminal reaches only this one.

    Args:
        environ: variables in addition to those of this process.
        grace_s: seconds that it gets to end.
    """
    return subprocess.Popen(
        supervised(command, grace_s),
        env={**os.environ, **environ},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def last_lines(log: Path, begin: int = 0) -> list[str]:
    """Return the last lines of a log that were written from byte `begin` on, without empty ones."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line[:LONGEST_LINE] for line in lines if line.strip()][-LAST_LINES:]


def last_words(log: Path, begin: int = 0) -> str:
    """Return the last lines of a log with its path, for messages about a process that ended."""
    lines = last_lines(log, begin)
    return "\n".join([f"The last lines of {log}:", *lines]) if lines else f"{log} is empty."


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
