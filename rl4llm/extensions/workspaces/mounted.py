"""A workspace whose files a holder of this machine has mounted, and whose programs run in bubblewrap."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl4llm.extensions.workspaces.images import Image, own
from rl4llm.extensions.workspaces.keeper import remove
from rl4llm.extensions.workspaces.orders import send
from rl4llm.extensions.workspaces.workspace import NONE, Program, Workspace, WorkspaceError

ANSWER_S = 300.0  # to open, start, read or write, on a machine where hundreds do so at once
PACK_S = 3600.0
CLOSE_S = 30.0
LINE_BYTES, ANSWER_BYTES = 1 << 20, 1 << 26


class Mounted(Workspace):
    """A workspace whose orders a holder obeys, in a directory of this machine."""

    def __init__(
        self,
        control: socket.socket,
        gone: asyncio.StreamReader,
        directory: Path,
        image: Image,
        release: Callable[[], None],
    ):
        super().__init__(image.environment, image.cwd, release)
        self._control, self._gone, self._directory = control, gone, directory
        self._starts = 0

    async def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] = NONE,
        cwd: str = "",
        files: Mapping[str, Path] = NONE,
        together: bool = False,
    ) -> Program:
        self._starts += 1
        number, binds = self._starts, []
        for index, (inside, source) in enumerate(files.items()):
            copy = f"files-{number}-{index}"
            await asyncio.to_thread(_bring, source, self._directory / copy)
            binds.append((copy, inside))
        order = {
            "what": "start", "number": number, "words": list(words), "files": binds,
            "env": {**self.environment, **env}, "cwd": os.path.join("/", self.cwd, cwd),
        }  # fmt: skip
        pipes = [os.pipe(), os.pipe(), *([] if together else [os.pipe()])]
        theirs = [pipes[0][0], pipes[1][1], pipes[-1][1]]
        ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]
        try:
            answers = await self._ask(order, *theirs)
            await message(answers, "start")
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)
        stdin, stdout = await _writer(ours[0]), await reader(ours[1])
        stderr = stdout if together else await reader(ours[2])

        async def end() -> tuple[int, str]:
            content = await message(answers, "run", None)
            return int(content["code"]), content["reason"]

        async def kill() -> None:
            self._send({"what": "kill", "number": number})

        return Program((stdin, stdout, stderr), end(), kill)

    async def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        content = await self._result({"what": "read", "path": path, "limit": limit})
        return None if content is None else b64decode(content)

    async def write(self, path: str, content: bytes) -> None:
        await self._result({"what": "write", "path": path, "content": b64encode(content).decode()})

    async def changes(self, limit: int = 1 << 16) -> str:
        return str(await self._result({"what": "changes", "limit": limit}))

    async def pack(self, archive: int) -> None:
        """Write a tar of the whole workspace to a descriptor."""
        await self._result({"what": "pack"}, archive)

    async def close(self) -> None:
        if self._control.fileno() < 0:
            return
        self._control.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.read(), CLOSE_S)
            await asyncio.to_thread(remove, str(self._directory))
        finally:
            self.release()

    async def _result(self, order: Mapping[str, Any], *descriptors: int) -> Any:
        answers = await self._ask(order, *descriptors)
        return (await message(answers, order["what"], PACK_S if descriptors else ANSWER_S))["result"]

    async def _ask(self, order: Mapping[str, Any], *descriptors: int) -> asyncio.StreamReader:
        """Send an order; return where its answers come."""
        answers, reply = os.pipe()
        try:
            self._send(order, reply, *descriptors)
        finally:
            os.close(reply)
        return await reader(answers, ANSWER_BYTES)

    def _send(self, order: Mapping[str, Any], *descriptors: int) -> None:
        if self._control.fileno() < 0:
            raise WorkspaceError("start: the workspace is closed")
        with suppress(BrokenPipeError, ConnectionResetError):  # the answers will end without a message
            send(self._control, order, *descriptors)


async def reader(descriptor: int, limit: int = LINE_BYTES) -> asyncio.StreamReader:
    """Return a stream of what arrives at the end of a pipe, which it closes at the end."""
    stream = asyncio.StreamReader(limit)
    file = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
    return stream


async def message(stream: asyncio.StreamReader, step: str, wait_s: float | None = ANSWER_S) -> dict[str, Any]:
    """Return the next message of a stream. Raises WorkspaceError, for one about an error too."""
    try:
        line = await asyncio.wait_for(stream.readline(), wait_s)
    except TimeoutError:
        line = b""
    ended = {"error": f"{step}: a process of the workspace ended"}
    content: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else ended
    if "error" in content:
        raise WorkspaceError(content["error"])
    return content


def _bring(source: Path, target: Path) -> None:
    """Copy a file or a directory of the host, and what its links lead to, to where a holder may read it."""
    try:
        subprocess.run(["cp", "-aL", "--reflink=auto", source, target], check=True, capture_output=True)
        own(target)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", error)
        raise WorkspaceError(f"start: {source} cannot be copied: {reason!r}") from error


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    file = os.fdopen(descriptor, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
    return asyncio.StreamWriter(transport, protocol, None, loop)
