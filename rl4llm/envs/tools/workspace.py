"""Files as tools: a directory for each episode, which is gone with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl4llm.envs.tools.tool import ToolError, ToolSet, register_tool, tool

MAX_FOUND = 50


@register_tool("workspace")
class Workspace(ToolSet):
    """Reads, writes, lists and searches text files in a directory of the episode's own.

    No path leads out of it, be it absolute, by ``..`` or through a symbolic link. Files that a task begins with stand in the
    column `files` of its row, a mapping from paths to texts.

    Args:
        max_bytes: of all files together, where the model writes.
        max_files: how many there may be.
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
            self._directory.cleanup()
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
        max_bytes, max_files = self._limits
        others = [file for file in self._files() if file != target]
        if len(data) + sum(file.stat().st_size for file in others) > max_bytes or len(others) >= max_files:
            raise ToolError(f"the workspace is full: at most {max_bytes} bytes in {max_files} files")
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
        found = [
            f"{self._name(file)}:{number}: {line.strip()[:200]}"
            for file in self._files()
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
            if text.lower() in line.lower()
        ]
        more = [f"and {len(found) - MAX_FOUND} more lines"] * (len(found) > MAX_FOUND)
        return "\n".join([*found[:MAX_FOUND], *more]) or "No line contains it."

    @property
    def root(self) -> Path:
        """The directory; it is made when it is first asked for."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="rl4llm-workspace-")
        return Path(self._directory.name).resolve()

    def _inside(self, path: str) -> Path:
        try:
            target = (self.root / path).resolve()
            target.exists()
        except (ValueError, OSError, RuntimeError) as error:  # a NUL, a name that is too long, a loop of links
            raise ToolError(f"{path[:100]!r} is no path") from error
        if not target.is_relative_to(self.root) or target == self.root:
            raise ToolError(f"{path[:100]!r} leads out of the workspace")
        return target

    def _file(self, path: str) -> Path:
        target = self._inside(path)
        if not target.is_file():
            raise ToolError(f"there is no file {path[:100]!r}; list_files says which there are")
        return target

    def _files(self) -> Iterator[Path]:
        return (file for file in sorted(self.root.rglob("*")) if file.is_file() and not file.is_symlink())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()
