"""Processes as the kernel shows them: their descendants, and the memory of processes, files and sockets."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(word) for task in tasks for word in _words(f"/proc/{pid}/task/{task}/children")]
    return []


def descendants_of(pid: int) -> list[int]:
    """Return all descendants, parents before their children."""
    pids: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children_of(parent)]
        pids += level
    return pids


def _words(path: str) -> list[str]:
    with suppress(OSError), open(path) as file:
        return file.read().split()
    return []


def resident(pid: int) -> int:
    """Return the bytes of memory that a process does not share with files."""
    numbers = _words(f"/proc/{pid}/statm")
    return (int(numbers[1]) - int(numbers[2])) * PAGE if len(numbers) > 2 else 0


def files_of(pid: int) -> tuple[int, int]:
    """Return the number of files that the sandbox of a process created, and their bytes, which are in memory."""
    count = size = 0
    for path in ("tmp", "dev/shm"):
        with suppress(OSError):
            state = os.statvfs(f"/proc/{pid}/root/{path}")
            count += state.f_files - state.f_ffree
            size += (state.f_blocks - state.f_bfree) * state.f_frsize
    return count, size


def in_sockets(pid: int) -> int:
    """Return the bytes that Unix sockets in the sandbox of a process may hold in the kernel, those in transit too."""
    with suppress(OSError), open(f"/proc/{pid}/net/unix", "rb") as sockets:
        return max(0, sockets.read().count(b"\n") - 1) * int(*_words("/proc/sys/net/core/wmem_default"))
    return 0


def owner_of(entry: Path) -> int:
    with suppress(OSError):
        return entry.stat().st_uid
    return -1


def kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
