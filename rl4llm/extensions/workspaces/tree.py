"""Files of a workspace. Each function runs in a separate process, which is locked into the tree: links are the policy's."""

from __future__ import annotations

import difflib
import filecmp
import os
import secrets
import shutil
import signal
import stat
import sys
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rl4llm.runtime.processes import tasks_of

MERGED, UPPER, LOWER = "merged", "upper", "lower"
SMALLEST_FILE = 4096  # bytes that every entry counts, so that empty files are bounded too
LONGEST_DIFF = 128 * 1024  # bytes of a file that is compared line by line
MOST_LINES = 3000
COMPARED_S = 10
DEEPEST = 100  # levels of directories that are compared
NULL = "/dev/null"
OPAQUE = "user.overlay.opaque"
File = tuple[int, int]  # its device and inode
Place = tuple[str, bool]  # of something mounted: its path, and whether it is a directory


def lock_into(directory: str) -> None:
    """Make a tree the root of this process, which from then on loads no code: what it would find is the tree's."""
    os.chroot(directory)
    os.chdir("/")
    sys.meta_path.clear()  # no module is imported
    vars(tarfile).update(pwd=None, grp=None)  # libc would load the libraries that /etc/nsswitch.conf names


def read(path: str, limit: int) -> str | None:
    """Return the first bytes of a regular file in base64, or None."""
    lock_into(MERGED)
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return b64encode(file.read(limit)).decode()
    return None


def write(path: str, content: str) -> None:
    """Write a file, given in base64, with its directories. What is in the way is replaced, a link too."""
    lock_into(MERGED)
    place, _ = _make(path, directory=False)
    beside = f"{place}.{secrets.token_hex(4)}"
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        file.write(b64decode(content))
    os.replace(beside, place)


def make_places(system: Sequence[Place], hidden: Sequence[Place]) -> tuple[list[str], list[str], list[str]]:
    """Make where something is mounted; return the paths of both without links, and what was created for the hidden ones.

    bwrap would follow a link out of the tree.
    """
    lock_into(MERGED)
    paths = [_make(path, directory=directory)[0] for path, directory in system]
    places = [_make(path, directory=directory) for path, directory in hidden]
    return paths, [path for path, _ in places], [path for _, created in places for path in created]


def remove_places(created: Sequence[str]) -> None:
    """Remove what `make_places` created, where it is still empty."""
    lock_into(MERGED)
    for path in reversed(created):
        with suppress(OSError):
            if os.path.isdir(path):
                os.rmdir(path)
            elif os.path.getsize(path) == 0:
                os.remove(path)


def _make(path: str, *, directory: bool) -> tuple[str, list[str]]:
    """Return a path without links of a directory or a regular file, and what had to be created for it."""
    place, created = "/", []
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for position, part in enumerate(parts):
        place = os.path.realpath(os.path.join(place, part))
        wants_file = position == len(parts) - 1 and not directory
        if os.path.lexists(place) and not (os.path.isfile(place) if wants_file else os.path.isdir(place)):
            _put_aside(place)
        for missing in reversed([place, *map(str, Path(place).parents)]):
            if not os.path.lexists(missing):
                Path(missing).touch() if wants_file and missing == place else os.mkdir(missing)
                created.append(missing)
        if not wants_file:
            os.chmod(place, os.stat(place).st_mode & 0o7777 | 0o700)
    return place, created


def _put_aside(path: str) -> None:
    """Move away what is in the way, or remove it where it is the image's: a tree of the policy may be too deep for that."""
    try:
        os.rename(path, f"{path}.{secrets.token_hex(4)}")
    except OSError:
        shutil.rmtree(path)


def size(pids: Sequence[int], most: int) -> int:
    """Return the bytes that a workspace holds on the disk, deleted files that are open too; it stops above `most`."""
    tasks = [task for pid in pids for task in tasks_of(pid)]
    deleted: dict[File, int] = {}
    for file, used in (mapping for task in tasks for mapping in _mapped(task)):
        deleted[file] = max(used, deleted.get(file, 0))
    deleted |= dict(entry for task in tasks for entry in _opened(task))
    total = sum(deleted.values())
    lock_into(".")
    # one for each level below /: a path may become longer than the kernel accepts
    directories = [iter([UPPER])]
    while directories and total <= most:
        if (name := next(directories[-1], None)) is None:
            directories.pop()
            os.chdir("..")
            continue
        with suppress(OSError):
            os.chdir(name)
            entries = list(os.scandir())
            directories.append(iter([entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]))
            total += sum(max(SMALLEST_FILE, _blocks(entry)) for entry in entries)
    return total


def _opened(task: str) -> Iterator[tuple[File, int]]:
    """Yield each deleted file that a thread has open, with its bytes."""
    with suppress(OSError):
        for entry in os.scandir(f"{task}/fd"):
            with suppress(OSError):
                state = os.stat(entry.path)
                if state.st_nlink == 0 and stat.S_ISREG(state.st_mode):
                    yield (state.st_dev, state.st_ino), state.st_blocks * 512


def _mapped(task: str) -> Iterator[tuple[File, int]]:
    """Yield each deleted file in a mapping, with its bytes as far as it is mapped."""
    with suppress(OSError), open(f"{task}/maps", "rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n"):
                places, _, offset, device, inode, _ = line.split(None, 5)
                start, end = (int(place, 16) for place in places.split(b"-"))
                major, minor = (int(part, 16) for part in device.split(b":"))
                yield (os.makedev(major, minor), int(inode)), int(offset, 16) + end - start


def _blocks(entry: os.DirEntry[str]) -> int:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_blocks * 512
    return 0


def changes(limit: int) -> str:
    """Return the unified diff of the files that differ from the image, in the order of their paths, with marks of cuts."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, COMPARED_S)
    lock_into(".")
    text = ""
    try:
        for piece in _compared("", below=True):
            text += piece
            if len(text) > limit:
                return f"{text[:limit]}\n[... the rest of the changes is omitted ...]\n"
    except KeyboardInterrupt:
        text += "[... the rest takes too long to compare ...]\n"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return text


def _compared(directory: str, *, below: bool) -> Iterator[str]:
    """Yield the differences in a directory; `below` says whether the image's directory shows through."""
    try:
        entries = sorted(os.scandir(f"{UPPER}/{directory}"), key=lambda entry: entry.name)
    except OSError as error:
        yield f"{_printable(directory)}: not readable ({error.strerror})\n"
        return
    for entry in entries:
        path = f"{directory}{entry.name}"
        if entry.is_dir(follow_symlinks=False) and path.count("/") >= DEEPEST:
            yield f"{_printable(path)}: too deep\n"
        elif entry.is_dir(follow_symlinks=False):
            through = below and _kind(f"{LOWER}/{path}") == "directory" and not _opaque(entry.path)
            yield from _compared(f"{path}/", below=through)
        else:
            yield from _difference(path, f"{LOWER}/{path}" if below else "", entry.path)


def _difference(path: str, old: str, new: str) -> Iterator[str]:
    before, after = _kind(old), _kind(new)
    name = _printable(path)
    if before != after and "file" not in (before, after):
        yield f"{name}: {before} became {after}\n"
        return
    removed, added = (_lines(file) if kind == "file" else [] for file, kind in ((old, before), (new, after)))
    if removed is None or added is None:
        if before != after or not filecmp.cmp(old, new, shallow=False):
            yield f"Files a/{name} and b/{name} differ (binary or long)\n"
        return
    names = (f"a/{name}" if before == "file" else NULL, f"b/{name}" if after == "file" else NULL)
    lines = list(difflib.unified_diff(removed, added, *names))
    if before != after and not lines:
        yield f"{name}: {before} became {after}, empty\n"
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _kind(path: str) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "nothing"
    if stat.S_ISLNK(mode):
        return f"a link to {_printable(os.readlink(path))}"
    # overlayfs marks deleted files by devices
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFCHR: "nothing"}
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _lines(path: str) -> list[str] | None:
    """Return the lines of a regular file, or None for one that is long or binary."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(LONGEST_DIFF + 1)
    if len(content) > LONGEST_DIFF or b"\0" in content or content.count(b"\n") > MOST_LINES:
        return None
    return content.decode(errors="replace").splitlines(keepends=True)


def _opaque(path: str) -> bool:
    with suppress(OSError):
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    return False


def _printable(path: str) -> str:
    text = path.encode(errors="surrogateescape").decode(errors="replace")
    return text if text.isprintable() else ascii(text)
