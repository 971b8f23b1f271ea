"""A lock on a directory, which ends with its process; and the directory of a user that no other user can enter."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from rl4llm.core.errors import RunDirError

UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
PATIENCE_S = 1.0


def private_directory(parent: Path | None = None) -> Path:
    """Return the directory `rl4llm-UID` of this user; make it, with mode 700, if it does not exist.

    It is in `parent`, by default the directory for temporary files: XDG_RUNTIME_DIR exists only in a login session, so a run
    under cron and one in a session would not see each other's locks. Everybody may write to `parent`, so raises
    PermissionError, before anything in it is opened, if another user could have filled it.
    """
    directory = (parent or Path(tempfile.gettempdir())) / f"rl4llm-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that only this user may write to")
    directory.chmod(0o700)
    return directory


class DirectoryLock:
    """Holds `<directory>/.lock` until `release` or the end of this process, however it ends.

    Child processes never hold it: one that outlives a killed trainer does not keep the directory locked. `supported` is
    False on a filesystem that has no locks; then nothing is guarded. A link in the place of the file is refused with an
    OSError, since the file is written to.
    """

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self.supported = True
        self._file = open(self.path, "a+b", buffering=0, opener=_no_link)  # noqa: SIM115 - open while it is locked
        try:
            self._acquire()
        except BaseException:
            self._file.close()
            raise
        dropped = weakref.WeakMethod(self._drop)
        os.register_at_fork(after_in_child=lambda: (drop := dropped()) and drop())

    def release(self) -> None:
        """Unlock the directory; a second call does nothing."""
        if not self._file.closed:
            self._file.truncate(0)
            self._drop()

    def _drop(self) -> None:
        self._file.close()

    def _acquire(self) -> None:
        """Take the lock; wait a moment for a viewer, and for one whose owner is dead or has not signed yet."""
        began = time.monotonic()
        while not self._taken():
            owner = _owner(self.path)
            if time.monotonic() - began > (0.1 if owner else PATIENCE_S):
                raise RunDirError(f"{self.path.parent} is in use by {owner or 'another process'}.")
            time.sleep(0.02)
        signature = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        self._file.truncate(0)
        self._file.write(json.dumps(signature).encode())

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.supported = False
        return True


def is_locked(directory: Path) -> bool | None:
    """Return whether a process holds the lock of a directory; None if that cannot be found out, as of another host's."""
    try:
        with open(directory / ".lock", "rb") as file:
            if (signature := file.read()) and json.loads(signature)["host"] != socket.gethostname():
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return False


def _no_link(path: str, flags: int) -> int:
    """Open a file unless its name leads, as a symbolic or a hard link, to what may be a file of somebody else's choice."""
    if not os.path.islink(path):  # for the message; O_NOFOLLOW guards
        handle = os.open(path, flags | os.O_NOFOLLOW, 0o666)
        if os.fstat(handle).st_nlink == 1:
            return handle
        os.close(handle)
    raise OSError(errno.ELOOP, f"{path} is a link; remove it")


def _owner(path: Path) -> str | None:
    """Return who signed the lock, unless that process is known to be dead."""
    try:
        owner = json.loads(path.read_text())
        pid, host, since = owner["pid"], owner["host"], owner["since"]
    except (ValueError, OSError, KeyError, TypeError):
        return None
    if host == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's process
            pass
    who = "this process itself" if pid == os.getpid() else f"another trainer, process {pid}"
    return f"{who} on {host}, since {since}"
