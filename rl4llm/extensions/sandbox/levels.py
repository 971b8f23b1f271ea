"""The command that starts an isolated bare Python, for each level of isolation."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl4llm.extensions.sandbox.packages import Mounted

FIRST_UID = 1_900_000_000  # above the uids that user databases and container runtimes assign; one per slot
SYSTEM_PYTHON = "/usr/bin/python3"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """A way to isolate programs, with `prefork` sandboxes that are started in advance.

    One without `own_files`, of rank 1, is refused for rewards unless allowed.
    """

    own_files: bool
    prefork: int = 0

    @property
    def rank(self) -> int:
        return 1 + self.own_files


LEVELS = {
    "prefork": Level(own_files=True, prefork=2),
    "bubblewrap": Level(own_files=True),
    "rlimits": Level(own_files=False),
}
"""In the order of preference. "prefork" is bubblewrap with sandboxes started in advance; each is used once. "rlimits" has
only kernel limits, a process group and an empty environment; the host's files and network stay visible."""


def bubblewrap(
    words: Sequence[str], disk_bytes: int, filter_fd: int | None = None, packages: Sequence[Mounted] = ()
) -> list[str]:
    """Return the command that runs a command of Python isolated.

    It has all namespaces, a file system of /usr and one small tmpfs, no capabilities and a system call filter.
    """
    # not the whole prefix, which may be a home directory
    libraries = os.path.join(os.path.dirname(os.path.dirname(words[0])), "lib")
    elsewhere = [path for path in (words[0], libraries) if not os.path.abspath(path).startswith("/usr/")]
    command = [find_bwrap() or "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session"]
    # No limit would count the memory of a shared mapping of /dev/zero.
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/null", "/dev/zero"]
    for path in ("/dev/shm", "/tmp"):
        command += ["--size", str(max(65536, disk_bytes // 2)), "--tmpfs", path]
    for path in ("/usr", *elsewhere):
        command += ["--ro-bind", path, path]
    command += [word for mount in packages for word in ("--ro-bind", mount.host, mount.inside)]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    # With a writable /proc, a program could lower its oom_score_adj and be spared when memory runs out.
    command += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--", *words]


def find_python(uid: int | None) -> str | None:
    """Return the interpreter for sandboxes that `uid` may run: this one's, else the system's, else None."""
    ours = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return next((path for path in (ours, os.path.realpath(SYSTEM_PYTHON)) if may_use(path, uid)), None)


def slot_uids(slots: int, uid_map: str | None = None) -> list[int | None]:
    """Return an unused uid for each slot, or None for the current user if this process cannot change its uid.

    `uid_map` is the text of /proc/self/uid_map: in a container, root may have few uids or only one.
    """
    if uid_map is None:
        if os.getuid() != 0:
            return [None] * slots
        uid_map = Path("/proc/self/uid_map").read_text()
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    start, _, count = max(ranges)
    lowest = FIRST_UID + 1000 * secrets.randbelow(100_000)  # other runs on this machine choose different ones
    if not start <= lowest < start + count - slots:
        lowest = start + count - 1 - slots - secrets.randbelow(500)
    return [None] * slots if count < 1000 + slots else [lowest + number for number in range(slots)]


def find_bwrap() -> str | None:
    return shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")


def may_use(path: str, uid: int | None) -> bool:
    """Return whether `uid` may run a program, or enter a directory, and all directories above it."""
    if uid is None:
        return os.access(path, os.X_OK)
    try:
        modes = [os.stat(part).st_mode for part in (Path(path), *Path(path).parents)]
    except OSError:
        return False
    return all(mode & 0o001 for mode in modes)  # an unassigned uid has only the permissions of "others"
