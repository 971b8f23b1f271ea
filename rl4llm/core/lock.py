"""One owner per directory: a lock that dies with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from rl4llm.core.errors import RunDirError

UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class DirectoryLock:
    """Holds `<directory>/.lock` until `release` or the end of this process, however it ends.

    Child processes never hold it: one that outlives a killed trainer does not keep the directory locked. `supported` is
    False on a filesystem that has no locks; then nothing is guarded.
    """

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self.supported = True
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open for as long as it is locked
        try:
            self._acquire()
        except BaseException:
            self._file.close()
            raise
        dropped = weakref.WeakMethod(self._drop)
        os.register_at_fork(after_in_child=lambda: (drop := dropped()) and drop())

    def release(self) -> None:
        """Let the directory go; a second call does nothing."""
        if not self._file.closed:
            self._file.truncate(0)
            self._drop()

    def _drop(self) -> None:
        self._file.close()

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(
                f"{self.path.parent} is in use by {_holder(self.path)}. "
                "Next: stop that one first, or give this run another output.dir."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.supported = False
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        self._file.truncate(0)
        self._file.write(json.dumps(owner).encode())


def _holder(path: Path, patience_s: float = 1.0) -> str:
    """Who holds the lock; an owner that has only just taken it is given a moment to write its name."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
            owner = json.loads(path.read_text())
            who = "this process itself" if owner["pid"] == os.getpid() else f"another trainer, process {owner['pid']}"
            text = f"{who} on {owner['host']}, since {owner['since']}"
            if owner["host"] != socket.gethostname() or _alive(owner["pid"]):
                return text
        if time.monotonic() > deadline:
            return f"another process; {path} does not say which"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and someone else's
        return True
    return True
