"""Directories of tasks as the rows of a dataset."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.tasks.task import MARKS, read_task

LARGE = 1 << 20
"""Bytes of a file above which its size stands for its content in the digest of a task."""


def task_rows(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the task of a directory, or those of the directories in it, also one level deeper, with their places.

    Raises DataError for a task that cannot be used, and for one that is there twice.
    """
    patterns = [below + mark for below in ("", "*/", "*/*/") for mark in MARKS]
    files = {file.parent for pattern in patterns for file in directory.glob(pattern)}
    places: dict[str, Path] = {}
    for path in sorted(path for path in files if files.isdisjoint(path.parents)):
        digest = _digest(path)
        if (place := places.setdefault(digest, path)) is not path:
            raise DataError(f"{path}: the task is the same as {place}. Remove one of them.")
        name = path.relative_to(directory).as_posix() if path != directory else path.resolve().name
        messages = [{"role": "user", "content": read_task(path).instruction}]
        columns = {"ground_truth": name, "task": str(path.resolve()), "task_digest": digest}
        yield str(path), {"prompt_id": name, "messages": messages, **columns}


def _digest(directory: Path) -> str:
    """Return a digest of the files of a task, so that a run that resumes notices changed tests.

    Raises DataError for a link out of the task, which would show the policy files of this machine. Those of the hub lead to
    its `blobs`; where COPY would keep them in an image, they lead nowhere.
    """
    digest, whole = hashlib.blake2b(digest_size=8), directory.resolve()
    paths = sorted(directory.rglob("*"))
    copies = any(path.name == "Dockerfile" for path in paths)
    blobs = [path.parent / "blobs" for path in whole.parents if path.name == "snapshots" and not copies]
    for path in filter(Path.is_symlink, paths):
        target = Path(os.path.realpath(path))
        if not path.exists() or not (target.is_relative_to(whole) or target.parent in blobs):
            raise DataError(f"{path}: the link leads out of the task, to {target}. Replace it with a copy.")
    for file in filter(Path.is_file, paths):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory)}\0{size}\0".encode(errors="surrogateescape"))
        digest.update(file.read_bytes() if size <= LARGE else b"")
    return digest.hexdigest()
