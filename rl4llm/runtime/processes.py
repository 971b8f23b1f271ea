"""Processes as the kernel shows them: their descendants, and the memory of processes, files and sockets."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    return [int(word) for task in tasks_of(pid) for word in _words(f"{task}/children")]


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


def tasks_of(pid: int) -> list[str]:
    """Return the directories of a process's threads: the process itself shows nothing once its first one has ended."""
    with suppress(OSError):
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    return []


def resident(pid: int) -> int:
    """Return the bytes of memory that a process does not share with files, and of its page tables."""
    for task in tasks_of(pid):
        words = _words(f"{task}/status")
        if "RssAnon:" in words:
            return sum(int(words[words.index(name) + 1]) << 10 for name in ("RssAnon:", "VmPTE:"))
    return 0


def first_alive(pids: Sequence[int]) -> int:
    """Return the first process that still has a root and a network, or 0: a zombie has neither."""
    return next((pid for pid in pids if os.access(f"/proc/{pid}/root", os.F_OK)), 0)


def files_of(pid: int, places: Sequence[str] = ("tmp", "dev/shm")) -> tuple[int, int]:
    """Return the number of files that the sandbox of a process created, and their bytes, which are in memory."""
    count = size = 0
    for path in places:
        with suppress(OSError):
            state = os.statvfs(f"/proc/{pid}/root/{path}")
            count += state.f_files - state.f_ffree
            size += (state.f_blocks - state.f_bfree) * state.f_frsize
    return count, size


def in_sockets(pid: int) -> int:
    """Return the bytes that all sockets in the network of a process may hold in the kernel, those in transit too."""
    words = _words(f"/proc/{pid}/net/sockstat")  # "sockets: used N"
    buffers = [_words(f"/proc/sys/net/core/{name}_default") for name in ("rmem", "wmem")]
    return int(words[2]) * max(int(*buffer) for buffer in buffers) if words else 0


def owner_of(entry: Path) -> int:
    with suppress(OSError):
        return entry.stat().st_uid
    return -1


def kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
