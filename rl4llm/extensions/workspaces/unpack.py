"""Archives of file systems, written by a process that is locked into the tree: no name or link in one leads outside."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import IO

from rl4llm.extensions.workspaces import namespaces, tree

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"  # before a name, or alone for its whole directory


def main() -> None:
    """Unpack the archive at standard input into a directory, the first argument; with another it is a layer over it."""
    if pid := namespaces.enter():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.chdir(sys.argv[1])
    namespaces.become_root()
    tree.lock_into(".")
    try:
        _unpack(sys.stdin.buffer, layer=len(sys.argv) > 2)
    except (OSError, tarfile.TarError) as error:
        sys.exit(str(error))


def pack(archive: int) -> None:
    """Write an archive of a whole workspace, without special files, to a descriptor."""
    tree.lock_into(tree.MERGED)
    with open(archive, "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for name in sorted(os.listdir("/")):
            tar.add(f"/{name}", name, filter=lambda member: None if member.isdev() else member)


def _unpack(archive: IO[bytes], layer: bool) -> None:
    """Unpack an archive, of any compression that tarfile knows, into /, without special files; a `layer` also removes.

    One user owns everything, and as root may change it; neither setuid nor setgid is kept.
    """
    written: set[str] = set()  # places of this layer, with the directories above them
    with tarfile.open(fileobj=archive, mode="r|*") as tar:
        tar.extraction_filter = lambda member, _: member
        for member in tar:
            place = os.path.normpath(f"/{member.name}")
            if member.isdev() or place == "/":
                continue
            if layer:
                written |= {place, *map(str, Path(place).parents)}
                if os.path.basename(place).startswith(WHITEOUT):
                    _remove_lower(place, written)
                    continue
            if not (member.isdir() and os.path.isdir(place)) or os.path.islink(place):
                _remove(place)
            member.name, member.uid, member.gid = place, 0, 0
            member.mode = (member.mode & 0o1777) | (0o700 if member.isdir() else 0o600)
            tar.extract(member, "/")


def _remove_lower(place: str, written: set[str]) -> None:
    """Remove what a whiteout at `place` hides in the layers below (image-spec 1.1, "Whiteouts")."""
    folder, name = os.path.split(place)
    target = folder if name == OPAQUE else os.path.normpath(os.path.join(folder, name.removeprefix(WHITEOUT)))
    if target not in written:
        _remove(target)
    for parent, names, files in os.walk(target):
        for path in {os.path.join(parent, entry) for entry in (*names, *files)} - written:
            _remove(path)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
