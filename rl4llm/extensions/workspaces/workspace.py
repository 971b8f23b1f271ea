"""A workspace as its caller holds it: starts programs, reads and writes files, and tells what changed."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl4llm.core.errors import DataError, RL4LLMError

PIECE_BYTES = 1 << 16
OUTPUT_CHARS = 1 << 16  # of a result
NONE: Mapping[str, Any] = MappingProxyType({})


class WorkspaceError(RL4LLMError):
    """A workspace failed, through no fault of what runs in it. The message begins with the step, such as "mount"."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a program did: its exit code (None after a timeout), and its standard output and error together.

    After a limit of the workspace the code is 137, and the last line of the output names the limit.
    """

    code: int | None
    output: str
    timed_out: bool = False


class Program:
    """A running program and its streams."""

    def __init__(
        self,
        streams: tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader],
        end: Coroutine[Any, Any, tuple[int, str]],
        kill: Callable[[], Awaitable[None]],
    ):
        self.stdin, self.stdout, self.stderr = streams
        self.reason = ""  # the limit of the workspace that ended it
        self._end = asyncio.ensure_future(end)
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # also if nobody waits
        self._kill = kill

    async def wait(self) -> int:
        """Return the exit code, 128 plus the number for a signal. Raises WorkspaceError if it never ran."""
        code, self.reason = await asyncio.shield(self._end)
        return code

    async def kill(self) -> None:
        """Kill the program and everything it started, and wait until nothing of it is left."""
        if not self._end.done():
            await self._kill()
        await self.wait()


class Workspace(ABC):
    """A tree of files that is copy-on-write over an image, in which one program runs at a time.

    `Workspaces.open` makes it. `close` ends what runs in it and removes it.
    """

    def __init__(self, environment: Mapping[str, str], cwd: str, release: Callable[[], None]):
        self.environment, self.cwd, self.release = environment, cwd, release

    @abstractmethod
    async def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] = NONE,
        cwd: str = "",
        files: Mapping[str, Path] = NONE,
        together: bool = False,
    ) -> Program:
        """Start a program, alone: what an earlier start left running is killed first.

        Args:
            env: variables in addition to the image's.
            cwd: a directory inside, by default the image's; it is created if it is missing.
            files: files and directories of the host, by their place inside. They are for this start only.
            together: whether standard output and error are one stream.
        """

    async def run(
        self,
        words: Sequence[str],
        *,
        wall_s: float,
        env: Mapping[str, str] = NONE,
        cwd: str = "",
        files: Mapping[str, Path] = NONE,
    ) -> Result:
        """Return the result of a program whose input is empty, and which is killed after `wall_s` seconds."""
        program = await self.start(words, env=env, cwd=cwd, files=files, together=True)
        program.stdin.close()
        output = Kept(2 * OUTPUT_CHARS)
        reading = asyncio.ensure_future(_fill(output, program.stdout))
        code = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wall_s):
                    code = await program.wait()
        except WorkspaceError as error:
            await reading
            reason = output.text(OUTPUT_CHARS)[-500:].strip()  # what bwrap or podman printed
            raise WorkspaceError(f"{error}: {reason}" if reason else str(error)) from None
        finally:
            await program.kill() if code is None else None
        await reading
        end = f"\n[ended: {program.reason}]" if program.reason and code is not None else ""
        return Result(code, output.text(OUTPUT_CHARS) + end, code is None)

    @abstractmethod
    async def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """Return the first `limit` bytes of a file inside, or None if there is no regular file."""

    @abstractmethod
    async def write(self, path: str, content: bytes) -> None:
        """Write a file inside, with its directories; what is at its path is replaced."""

    @abstractmethod
    async def changes(self, limit: int = 1 << 16) -> str:
        """Return what differs from the image, with a mark where it was cut."""

    @abstractmethod
    async def close(self) -> None:
        """End what runs, and remove the workspace. A second call does nothing."""

    async def place(self, files: Any) -> None:
        """Write a row's column `files`: texts by their paths from the working directory; None writes nothing.

        Raises DataError for another column.
        """
        if not isinstance(files or {}, Mapping):
            raise DataError(f"the column 'files' is {files!r:.60}, not a mapping from paths to texts.")
        for path, text in (files or {}).items():
            if text is not None:  # as in a column of structs, which have the paths of all rows
                await self.write(os.path.join("/", self.cwd, path), str(text).encode())


async def _fill(output: Kept, stream: asyncio.StreamReader) -> None:
    while piece := await stream.read(PIECE_BYTES):
        output.add(piece)


class Kept:
    """The beginning and the end of an output, `most` bytes each."""

    def __init__(self, most: int):
        self._most, self._head, self._tail, self.size = most, bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Add what was read next; `size` counts all bytes."""
        self.size += len(data)
        room = self._most - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._most)]

    def text(self, max_chars: int) -> str:
        """Return valid Unicode of at most `max_chars` characters beside a mark for what was cut out of the middle."""
        parts = (self._head, self._tail)
        if self.size == len(self._head) + len(self._tail):
            parts = (self._head + self._tail,) * 2
            if len(whole := parts[0].decode(errors="replace")) <= max_chars:
                return whole
        half = max_chars // 2
        begin, end = (part.decode(errors="replace") for part in parts)
        begin, end = begin[: max_chars - half], end[len(end) - half :]
        return f"{begin}\n[{self.size - len((begin + end).encode())} bytes cut]\n{end}"
