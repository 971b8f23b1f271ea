"""Archives of file systems, written by a process that is locked into the tree: no name or link in one leads outside."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from rl4llm.extensions.workspaces import namespaces, tree

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"  # of a layer that removes what is below it
COPIED = "RL4LLM.name"
"""Header of what a Dockerfile copies: a directory stays as it is, and a file comes into it under this name."""
MOST_BYTES = 256 << 30
SHELL = "/bin/sh"


def main() -> None:
    """Unpack the archive at standard input into a directory, the only argument; print whether it has a shell then."""
    if pid := namespaces.enter():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.chdir(sys.argv[1])
    namespaces.become_root()
    tree.lock_into(".")
    try:
        apply(sys.stdin.buffer)
    except (OSError, tarfile.TarError) as error:
        sys.exit(str(error))
    sys.stdout.write(str(os.path.exists(SHELL)))


def apply(archive: IO[bytes]) -> None:
    """Unpack an archive, of any compression that tarfile knows, into /; a layer also removes."""
    written: set[str] = set()
    total = 0
    with tarfile.open(fileobj=archive, mode="r|*") as tar:
        for member in tar:
            total += member.size
            if total > MOST_BYTES:
                raise tarfile.TarError(f"more than {MOST_BYTES} bytes")
            place = os.path.normpath(f"/{member.name}")
            folder, name = os.path.split(place)
            if name == OPAQUE:
                for entry in _entries(folder):
                    if entry not in written:
                        _remove(entry)
            elif name.startswith(WHITEOUT):
                _remove(f"{folder}/{name.removeprefix(WHITEOUT)}")
            elif place != "/" and (
                member.isreg() or member.isdir() or member.issym() or member.islnk()
            ):  # no devices
                _write(tar, member, place)
                written |= {place, *map(str, Path(place).parents)}


def pack(archive: IO[bytes]) -> None:
    """Write an archive of /, without special files."""
    with tarfile.open(fileobj=archive, mode="w|") as tar:
        for name in sorted(os.listdir("/")):
            tar.add(f"/{name}", name, filter=lambda member: None if member.isdev() else member)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
    """Write a member. One user owns everything, and as root may change it; neither setuid nor setgid is kept."""
    if COPIED in member.pax_headers and os.path.isdir(place):
        if member.isdir():
            return None
        place = os.path.join(place, os.path.basename(member.pax_headers[COPIED]))
        if os.path.isdir(place):
            raise tarfile.TarError(f"{place} is a directory")
    if not (member.isdir() and os.path.isdir(place)):
        _remove(place)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if member.issym():
        return os.symlink(member.linkname, place)
    if member.islnk():
        return os.link(os.path.join("/", member.linkname), place)
    if member.isdir():
        os.makedirs(place, exist_ok=True)
    else:
        content = tar.extractfile(member)
        with open(place, "xb") as file:
            shutil.copyfileobj(content or io.BytesIO(), file)
    os.chmod(place, (member.mode & 0o1777) | (0o700 if member.isdir() else 0o600))
    return os.utime(place, (member.mtime, member.mtime))


def _entries(folder: str) -> Iterator[str]:
    with suppress(OSError):
        yield from [os.path.join(folder, name) for name in os.listdir(folder)]


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
