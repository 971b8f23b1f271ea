"""Processes as the kernel shows them: their descendants, and the memory of processes, files and sockets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for task in os.listdir(f"/proc/{pid}/task")
            for word in _text(f"/proc/{pid}/task/{task}/children")
        ]
    except OSError:
        return []


def descendants_of(pid: int) -> list[int]:
    """Return all descendants, parents before their children."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children_of(parent)]
        found += level
    return found


def _text(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:
        return []


def resident(pid: int) -> int:
    """Return the bytes of memory that a process does not share with files."""
    numbers = _text(f"/proc/{pid}/statm")
    return (int(numbers[1]) - int(numbers[2])) * PAGE if len(numbers) > 2 else 0


def files_of(pid: int) -> tuple[int, int]:
    """Return the number of files that the sandbox of a process created, and their bytes, which are in memory."""
    number = held = 0
    for path in ("tmp", "dev/shm"):
        try:
            state = os.statvfs(f"/proc/{pid}/root/{path}")
        except OSError:
            continue
        number += state.f_files - state.f_ffree
        held += (state.f_blocks - state.f_bfree) * state.f_frsize
    return number, held


def in_sockets(pid: int) -> int:
    """Return the bytes that Unix sockets in the sandbox of a process may hold in the kernel, including sockets in
    transit.
    """
    try:
        with open(f"/proc/{pid}/net/unix", "rb") as sockets, open("/proc/sys/net/core/wmem_default") as most:
            return max(0, sockets.read().count(b"\n") - 1) * int(most.read())
    except OSError:
        return 0


def owner_of(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return
