"""Where versions of the weights lie: in shared memory if every server is a process of this machine, else on a disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from yarl import URL

from rl4llm.config.keys import SyncConfig
from rl4llm.core.errors import RunDirError
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runs.lock import DirectoryLock, private_directory
from rl4llm.runtime.ports import holder, is_loopback

SHARED = Path("/dev/shm")
MARGIN = 2  # how often what the versions take must be free in the machine's memory
GROUP = Path("/sys/fs/cgroup")


def open_store(
    sync: SyncConfig, on_disk: Path, urls: Sequence[str], dtype: torch.dtype, tell: Callable[[str], None]
) -> WeightStore:
    """Return the store in `sync.dir`; without that key in shared memory, or `on_disk` where that is not possible."""
    if sync.dir:
        return WeightStore(sync.dir, keep=sync.keep, dtype=dtype)

    def choose(num_bytes: int) -> Path | None:
        try:
            problem = unusable(urls, num_bytes * (sync.keep + 1))  # one more while it is written
            if problem is None:
                directory = place_of(on_disk)
                tell(f"Weights are published through {directory}, since every server is on this machine.")
                return directory
        except OSError as error:
            problem = str(error)
        if problem:
            tell(f"Weights are published through {on_disk}, not through shared memory: {problem}.")
        return None

    return WeightStore(on_disk, keep=sync.keep, dtype=dtype, choose=choose)


def place_of(on_disk: Path) -> Path:
    """Return the directory in shared memory for a run, the same after a kill; remove those of runs that were killed."""
    private = private_directory(SHARED)
    digest = hashlib.sha256(str(on_disk.absolute()).encode()).hexdigest()[:16]
    for directory in private.iterdir():
        if directory.name != digest:
            _remove_if_abandoned(directory)
    return private / digest / "weights"


def unusable(urls: Sequence[str], needed: int) -> str | None:
    """Return why servers cannot read `needed` bytes from shared memory; "" if one is elsewhere, None if they can."""
    for url in urls:
        pid = _server(URL(url))
        if pid is None:
            return ""
        try:
            theirs = os.stat(f"/proc/{pid}/root{SHARED}")
            shares = os.path.samestat(theirs, os.stat(SHARED))
        except OSError:
            return f"{url} is a process of another user"
        if not shares:
            return f"{url} is in a container with another {SHARED}"
    free, available = shutil.disk_usage(SHARED).free, _available()
    if free < needed or available < MARGIN * needed:
        return (
            f"{needed / 2**30:.1f} GiB are needed, {SHARED} has {free / 2**30:.1f} GiB, and the machine's memory "
            f"{available / 2**30:.1f} GiB (less than {MARGIN} times as much)"
        )
    return None


def _server(url: URL) -> int | None:
    """Return the process that serves there on this machine; what forwards to another machine is usually not Python."""
    pid = holder(url.port or 0) if is_loopback(url.host or "") else None
    try:
        return pid if pid and Path(psutil.Process(pid).exe()).name.startswith("python") else None
    except psutil.Error:
        return None


def _available() -> int:
    """Return the bytes that this process may still use: of the machine, and of its control group."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit, used = (int((GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _remove_if_abandoned(directory: Path) -> None:
    """Remove the directory of another run, unless a process holds its lock or has just made it."""
    weights = directory / "weights"
    if not (weights / ".lock").exists():
        return
    with suppress(RunDirError, OSError):
        lock = DirectoryLock(weights)
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()
