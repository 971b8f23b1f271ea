"""Files as tools: a directory for each episode, which is gone with it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rl4llm.core.message import shortened
from rl4llm.envs.tools.tool import ToolError, ToolSet, tool

MAX_FOUND = 50
MAX_DEPTH = 16  # directories above a file
MAX_PATH = 4000  # characters; to resolve many thousands takes long
DIRECTORY_BYTES = 4096  # of `max_bytes` that a directory takes, as on most file systems


class Workspace(ToolSet):
    """Reads, writes, lists and searches text files in a directory of the episode's own.

    No path leads out of it, be it absolute, by ``..`` or through a symbolic link. Files that a task begins with stand in the
    column `files` of its row, a mapping from paths to texts. A file lies in at most 16 directories, one in another.

    Args:
        max_bytes: of all files and directories together; a directory counts as 4096.
        max_files: how many files there may be, and how many directories.
    """

    def __init__(self, max_bytes: int = 1_000_000, max_files: int = 200):
        super().__init__()
        self._limits = max_bytes, max_files
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def open(self, sample: Any) -> Workspace:
        opened = Workspace(*self._limits)
        for path, text in (sample.columns.get("files") or {}).items():
            opened.write_file(path, text)
        return opened

    def close(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()  # its recursion is as deep as MAX_DEPTH
            self._directory = None

    @tool
    def read_file(self, path: str) -> str:
        """Read a text file.

        Args:
            path: Where the file lies, for example "notes/today.txt".
        """
        return self._file(path).read_text(errors="replace")

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Write a text file, a new one or in place of an old one.

        Args:
            path: Where the file lies, for example "notes/today.txt".
            text: All that is to be in it.
        """
        data, target = text.encode(errors="replace"), self._inside(path)
        if len(target.relative_to(self.root).parts) > MAX_DEPTH + 1:
            raise ToolError(f"{path[:100]!r} is too deep: at most {MAX_DEPTH} directories, one in another")
        self._check_room(target, len(data))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            raise ToolError(f"{path} cannot be written: {error.strerror}") from error
        return f"{len(data)} bytes are in {path}"

    @tool
    def list_files(self) -> str:
        """List the paths of all files."""
        return "\n".join(self._name(file) for file in self._files()) or "There are no files."

    @tool
    def search_files(self, text: str) -> str:
        """Find the lines of all files that contain a text.

        Args:
            text: What to look for, upper and lower case alike.
        """
        hits = (
            (file, number, line)
            for file in self._files()
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
            if text.lower() in line.lower()
        )
        lines = [
            f"{self._name(file)}:{number}: {shortened(line.strip(), 200)}"
            for file, number, line in islice(hits, MAX_FOUND)
        ]
        rest = sum(1 for _ in hits)
        return "\n".join([*lines, *[f"and {rest} more lines"] * (rest > 0)]) or "No line contains it."

    @property
    def root(self) -> Path:
        """The directory; it is made when it is first asked for."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="rl4llm-workspace-")
        return Path(self._directory.name).resolve()

    def _check_room(self, target: Path, size: int) -> None:
        """Raise ToolError where a file of that size, with the directories that it needs, does not fit."""
        max_bytes, max_files = self._limits
        files = [file for file in self._files() if file != target]
        directories = {path for path in self.root.rglob("*") if path.is_dir() and not path.is_symlink()}
        directories |= {path for path in target.parents if self.root in path.parents}
        size += sum(file.stat().st_size for file in files) + DIRECTORY_BYTES * len(directories)
        if size > max_bytes or len(files) >= max_files or len(directories) > max_files:
            limits = f"at most {max_bytes} bytes in {max_files} files and as many directories"
            raise ToolError(f"the workspace is full: {limits}")

    def _inside(self, path: str) -> Path:
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # a NUL, a long name, a loop of links
            target = (self.root / path[:MAX_PATH]).resolve()
            target.exists()
            if len(path) <= MAX_PATH and target.is_relative_to(self.root) and target != self.root:
                return target
        raise ToolError(f"{path[:100]!r} is not a path in the workspace")

    def _file(self, path: str) -> Path:
        target = self._inside(path)
        if not target.is_file():
            raise ToolError(f"the file {path[:100]!r} does not exist; list_files shows which there are")
        return target

    def _files(self) -> Iterator[Path]:
        return (file for file in sorted(self.root.rglob("*")) if file.is_file() and not file.is_symlink())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()
