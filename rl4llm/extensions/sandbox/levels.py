"""The command that starts an isolated bare Python, for each level of isolation."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl4llm.extensions.sandbox.packages import Mounted

FIRST_UID = 1_900_000_000  # above the uids that user databases and container runtimes assign; one per slot
SYSTEM_PYTHON = "/usr/bin/python3"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_PYTHON_FLAGS = ("-s", "-S", "-B", "-c")


@dataclass(frozen=True, slots=True)
class Start:
    """How a process in a sandbox is started. `directory` is on the host; None if the sandbox has a separate one."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None
    needs_filter: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A way to isolate. `rank` is 1 for the weakest; a level below 2 is refused for rewards unless allowed."""

    name: str
    rank: int
    prefork: int
    start: Callable[..., Start]
    own_files: bool


def rlimits(python: str, arguments: Sequence[str], directory: str, **_: object) -> Start:
    """Kernel limits, a process group and an empty environment; the host's files and network stay visible."""
    return Start(
        [python, *_PYTHON_FLAGS, *arguments],
        {**_ENVIRONMENT, "HOME": directory, "TMPDIR": directory},
        directory,
    )


def bubblewrap(
    python: str,
    arguments: Sequence[str],
    *,
    disk_bytes: int,
    filter_fd: int | None = None,
    packages: Sequence[Mounted] = (),
    bwrap: str = "bwrap",
    **_: object,
) -> Start:
    """Isolate with all namespaces, a file system of /usr and one small tmpfs, no capabilities, a system call filter."""
    # not the whole prefix, which may be a home directory
    libraries = os.path.join(os.path.dirname(os.path.dirname(python)), "lib")
    elsewhere = [path for path in (python, libraries) if not os.path.abspath(path).startswith("/usr/")]
    readable = ["/usr", *elsewhere]
    command = [
        bwrap,
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
    ]
    command += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    # No limit would count the memory of a shared mapping of /dev/zero.
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/null", "/dev/zero"]
    for path in ("/dev/shm", "/tmp"):
        command += ["--size", str(max(65536, disk_bytes // 2)), "--tmpfs", path]
    for path in readable:
        command += ["--ro-bind", path, path]
    command += [word for mount in packages for word in ("--ro-bind", mount.host, mount.inside)]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    # With a writable /proc, a program could lower its oom_score_adj and be spared when memory runs out.
    command += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return Start([*command, "--", python, *_PYTHON_FLAGS, *arguments], {}, "/", needs_filter=True)


LEVELS = {
    "prefork": Level("prefork", 2, 2, bubblewrap, own_files=True),
    "bubblewrap": Level("bubblewrap", 2, 0, bubblewrap, own_files=True),
    "rlimits": Level("rlimits", 1, 0, rlimits, own_files=False),
}
"""In the order of preference. "prefork" is bubblewrap with sandboxes started in advance; each is used once."""


def find_python(uid: int | None) -> str | None:
    """Return the interpreter for sandboxes that `uid` may run: this one's, else the system's, else None."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return next((path for path in (own, os.path.realpath(SYSTEM_PYTHON)) if may_use(path, uid)), None)


def slot_uids(slots: int, uid_map: str | None = None) -> list[int | None]:
    """Return an unused uid for each slot, or None for the current user if this process cannot change its uid.

    `uid_map` is the text of /proc/self/uid_map: in a container, root may have few uids or only one.
    """
    if uid_map is None:
        if os.getuid() != 0:
            return [None] * slots
        uid_map = Path("/proc/self/uid_map").read_text()
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    first, _, count = max(ranges)
    wanted = FIRST_UID + 1000 * secrets.randbelow(100_000)  # other runs on this machine choose different ones
    if first <= wanted < first + count - slots:
        return [wanted + number for number in range(slots)]
    if count < 1000 + slots:
        return [None] * slots
    lowest = first + count - 1 - slots - secrets.randbelow(500)
    return [lowest + number for number in range(slots)]


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
