"""A workspace as its caller holds it: starts programs, reads and writes files, and tells what changed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError, RL4LLMError
from rl4llm.extensions.workspaces.keeper import remove

ANSWER_S = 300.0  # to open, start, read or write, on a machine where hundreds do so at once
CLOSE_S = 30.0
LINE_BYTES = 1 << 20
PIECE_BYTES = 1 << 16


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
    truncated: bool = False


class Program:
    """A running program and its streams."""

    def __init__(
        self,
        end: asyncio.StreamReader,
        streams: tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader],
        kill: Callable[[], None],
    ):
        self.stdin, self.stdout, self.stderr = streams
        self.reason = ""  # the limit of the workspace that ended it
        self._end: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(message(end, "run"))
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # also if nobody waits
        self._kill = kill

    async def wait(self) -> int:
        """Return the exit code, 128 plus the number for a signal. Raises WorkspaceError if it never ran."""
        end = await asyncio.shield(self._end)
        self.reason = end["reason"]
        return int(end["code"])

    async def kill(self) -> None:
        """Kill the program and everything it started, and wait until nothing of it is left."""
        self._kill()
        await self.wait()


class Workspace:
    """A tree of files that is copy-on-write over an image, in which one program runs at a time.

    `Workspaces.open` makes it. `close` ends what runs in it and removes it.
    """

    def __init__(
        self,
        control: socket.socket,
        gone: asyncio.StreamReader,
        directory: Path,
        image: tuple[Mapping[str, str], str],
        output_bytes: int,
        bring: Callable[[Path, Path], Awaitable[None]],
        release: Callable[[], None],
    ):
        self.environment, self.cwd = image
        self._control, self._gone, self._directory = control, gone, directory
        self._output_bytes = output_bytes
        self._bring, self.release = bring, release
        self._starts = 0

    async def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> Program:
        """Start a program, alone: what an earlier start left running is killed first.

        Args:
            env: variables in addition to the image's.
            cwd: a directory inside, by default the image's; it is created if it is missing.
            files: files and directories of the host, by their place inside. They are read-only, for this start only.
        """
        return await self._start(words, env, cwd, files, together=False)

    async def run(
        self,
        words: Sequence[str],
        *,
        input: bytes = b"",
        wall_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> Result:
        """Return the result of a program that gets `input` and is killed after `wall_s` seconds."""
        program = await self._start(words, env, cwd, files, together=True)
        limit = self._output_bytes
        output = Kept(2 * limit)
        feeding = asyncio.ensure_future(_feed(program.stdin, input))
        reading = asyncio.ensure_future(_fill(output, program.stdout))
        code = None
        try:
            async with asyncio.timeout(wall_s):
                code = await program.wait()
        except TimeoutError:
            pass
        except WorkspaceError as error:
            await reading
            raise WorkspaceError(
                ": ".join(filter(None, (str(error), output.text(limit)[-500:].strip())))
            ) from None
        finally:
            feeding.cancel()
            await program.kill() if code is None and not program._end.done() else None
        await reading
        reason = f"\n[ended: {program.reason}]" if program.reason and code is not None else ""
        return Result(
            code, output.text(limit) + reason, timed_out=code is None, truncated=output.size > limit
        )

    async def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """Return the first `limit` bytes of a file inside, or None if there is no regular file."""
        answer, rest = await self._ask({"what": "read", "path": path, "limit": limit}, "read")
        content = await _whole(rest, "read")
        return None if answer["absent"] else content

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file inside, with its directories; what is at its path is replaced."""
        with open(os.memfd_create("content"), "wb") as file:
            file.write(content)
            file.flush()
            await self._ask({"what": "write", "path": path, "mode": mode}, "write", file.fileno())

    async def place(self, files: Any) -> None:
        """Write a row's column `files`: texts by their paths from the working directory; None writes nothing.

        Raises DataError for another column.
        """
        if not isinstance(files or {}, Mapping):
            raise DataError(f"the column 'files' is {files!r:.60}, not a mapping from paths to texts.")
        for path, text in (files or {}).items():
            if text is not None:  # as in a column of structs, which have the paths of all rows
                await self.write(os.path.join("/", self.cwd, path), str(text).encode())

    async def changes(self, limit: int = 1 << 16) -> str:
        """Return a unified diff of the files that differ from the image, with a mark where it was cut."""
        _, rest = await self._ask({"what": "changes", "limit": limit}, "changes")
        text = (await _whole(rest, "changes")).decode(errors="replace")
        return (
            text if len(text) < limit else f"{text[:limit]}\n[... the rest of the changes is omitted ...]\n"
        )

    async def unpack(self, archive: int) -> None:
        """Unpack a tar, given by its descriptor, into the workspace."""
        await self._ask({"what": "unpack"}, "unpack", archive, wait_s=None)

    async def pack(self, archive: int) -> None:
        """Write a tar of the whole workspace to a descriptor."""
        await self._ask({"what": "pack"}, "pack", archive, wait_s=None)

    async def close(self) -> None:
        """End what runs, and remove the workspace. A second call does nothing."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.read(), CLOSE_S)
            await asyncio.to_thread(remove, str(self._directory))
        finally:
            self.release()

    async def _start(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        files: Mapping[str, Path] | None,
        *,
        together: bool,
    ) -> Program:
        self._starts += 1
        number, binds = self._starts, []
        for index, (inside, source) in enumerate((files or {}).items()):
            copy = f"files-{number}-{index}"
            await self._bring(Path(source), self._directory / copy)
            binds.append((copy, inside))
        order = {
            "what": "start", "number": number, "words": list(words), "files": binds,
            "env": {**self.environment, **(env or {})}, "cwd": os.path.join("/", self.cwd, cwd or ""),
        }  # fmt: skip
        pipes = [os.pipe(), os.pipe(), *([] if together else [os.pipe()])]
        theirs = [pipes[0][0], pipes[1][1], pipes[-1][1]]
        ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]
        try:
            _, end = await self._ask(order, "start", *theirs)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)
        stdin, stdout = await _writer(ours[0]), await reader(ours[1])
        stderr = stdout if together else await reader(ours[2])
        return Program(end, (stdin, stdout, stderr), lambda: self._send({"what": "kill", "number": number}))

    async def _ask(
        self, order: Mapping[str, Any], step: str, *descriptors: int, wait_s: float | None = ANSWER_S
    ) -> tuple[dict[str, Any], asyncio.StreamReader]:
        """Send an order; return the first message of the answer, and where the rest of it comes."""
        answer, reply = os.pipe()
        try:
            self._send(order, reply, *descriptors)
        finally:
            os.close(reply)
        stream = await reader(answer)
        try:
            return await asyncio.wait_for(message(stream, step), wait_s), stream
        except TimeoutError:
            raise WorkspaceError(f"{step}: no answer in {wait_s:g} s") from None

    def _send(self, order: Mapping[str, Any], *descriptors: int) -> None:
        if self._control.fileno() < 0:
            raise WorkspaceError("start: the workspace is closed")
        with suppress(BrokenPipeError, ConnectionResetError):  # the answer will end without a message
            send(self._control, order, *descriptors)


def send(control: socket.socket, order: Mapping[str, Any], *descriptors: int) -> None:
    """Send an order of any length, with descriptors, to the keeper or a holder."""
    with open(os.memfd_create("order"), "wb") as file:
        file.write(json.dumps(order).encode())
        file.flush()
        socket.send_fds(control, [b"+"], [file.fileno(), *descriptors])


async def reader(descriptor: int) -> asyncio.StreamReader:
    """Return a stream of what arrives at the end of a pipe, which it closes at the end."""
    stream = asyncio.StreamReader(LINE_BYTES)
    file = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
    return stream


async def message(stream: asyncio.StreamReader, step: str) -> dict[str, Any]:
    """Return the next message of an answer. Raises WorkspaceError, for one about an error too."""
    line = await stream.readline()
    if not line.endswith(b"\n"):
        raise WorkspaceError(f"{step}: a process of the workspace ended")
    content: dict[str, Any] = json.loads(line)
    if "error" in content:
        raise WorkspaceError(content["error"])
    return content


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    file = os.fdopen(descriptor, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _whole(stream: asyncio.StreamReader, step: str) -> bytes:
    content = await asyncio.wait_for(stream.read(), ANSWER_S)
    if not content.endswith(b"\0"):
        raise WorkspaceError(f"{step}: it took too long")
    return content[:-1]


async def _feed(stdin: asyncio.StreamWriter, content: bytes) -> None:
    with suppress(ConnectionError):
        stdin.write(content)
        await stdin.drain()
    stdin.close()


async def _fill(output: Kept, stream: asyncio.StreamReader) -> None:
    while piece := await stream.read(PIECE_BYTES):
        output.add(piece)


class Kept:
    """The beginning and the end of an output, `most` bytes each."""

    def __init__(self, most: int):
        self._most, self._head, self._tail, self._cut = most, bytearray(), bytearray(), 0

    @property
    def size(self) -> int:
        """The number of all bytes."""
        return len(self._head) + self._cut + len(self._tail)

    def add(self, data: bytes) -> None:
        """Add what was read next."""
        room = self._most - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (over := len(self._tail) - self._most) > 0:
            del self._tail[:over]
            self._cut += over

    def text(self, max_chars: int) -> str:
        """Return valid Unicode of at most `max_chars` characters beside a mark for what was cut out of the middle."""
        if not self._cut and len(whole := (self._head + self._tail).decode(errors="replace")) <= max_chars:
            return whole
        half = max_chars // 2
        first = (self._head + self._tail).decode(errors="replace")[: max_chars - half]
        last = (self._tail if self._cut else self._head + self._tail).decode(errors="replace")
        last = last[len(last) - half :]
        cut = self.size - len((first + last).encode())
        return f"{first}\n[{cut} bytes cut]\n{last}"
