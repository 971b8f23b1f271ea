"""Workspaces that are containers of podman or docker, with the isolation and the limits of that engine.

Between two starts a container is restarted, which ends all its processes and leaves its files.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.extensions.workspaces.mounted import ANSWER_S, LINE_BYTES, message
from rl4llm.extensions.workspaces.start import KILLED, NOT_STARTED, OPEN_FILES
from rl4llm.extensions.workspaces.workspace import NONE, Program, Workspace, WorkspaceError

LABEL = "rl4llm"
IDLE = "while :; do sleep 1000; done"
ENTER = 'mkdir -p "$1" && cd "$1" && shift && exec "$@"'
CLEAR = 'for place; do rm -rf "$place"; done; exit 0'
WAIT_S = {"build": None, "pull": None, "exec": 60.0}  # for commands of the engine, by default ANSWER_S
Ask = Callable[[Mapping[str, object]], Awaitable[tuple[socket.socket, asyncio.StreamReader]]]


@dataclass(frozen=True, slots=True)
class Image:
    """An image of an engine, and how programs begin in it."""

    engine: str
    name: str
    environment: Mapping[str, str]
    cwd: str


async def prepare(engine: str, name: str) -> Image:
    """Return the image that an engine has, pulls or builds from a directory. Raises WorkspaceError."""
    directory = Path(name).expanduser()
    if (directory / "Dockerfile").is_file():
        name = (await _output(engine, "build", "-q", str(directory.resolve()))).decode().strip()
    try:
        details = await _output(engine, "image", "inspect", name)
    except WorkspaceError:
        name = (await _output(engine, "pull", "-q", name)).decode().strip()
        details = await _output(engine, "image", "inspect", name)
    config = json.loads(details)[0]["Config"]
    environment = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    return Image(engine, name, environment, config.get("WorkingDir") or "/")


def removal(engine: str, base: Path) -> list[str]:
    """Return the words that remove the containers of a keeper's directory, and fail if one stays."""
    names = f"names=$({engine} ps -aq --filter label={LABEL}={base})"
    script = f'set -e; {names}; test -z "$names" || {engine} rm -f $names'
    return ["sh", "-c", script] if engine != "bwrap" else []


class Container(Workspace):
    """A workspace that is a container. Files of a start are copied into it, and removed before the next start."""

    def __init__(
        self, image: Image, base: Path, ask: Ask, doors: Mapping[str, Any], release: Callable[[], None]
    ):
        super().__init__(image.environment, image.cwd, release)
        self._image, self._base, self._ask, self._doors = image, base, ask, doors
        self._name = f"{LABEL}-{secrets.token_hex(8)}"
        self._gate: socket.socket | None = None
        self._fresh, self._broken, self._closed = True, False, False
        self._files: list[str] = []

    async def create(self, limits: Mapping[str, int], options: Sequence[str]) -> None:
        """Start the container, which the keeper removes at the latest."""
        memory = limits["memory_bytes"]
        # The engine's defaults may be more than this user has. The number of processes is that of --pids-limit.
        bounds = {"nofile": OPEN_FILES, "nproc": OPEN_FILES, "fsize": limits["disk_bytes"], "core": 0}
        ulimits = [word for name, most in bounds.items() for word in ("--ulimit", f"{name}={most}:{most}")]
        words = [
            "run", "-d", "--name", self._name, "--label", f"{LABEL}={self._base}", "--network", "none",
            "--log-driver", "none", "--stop-timeout", "0", "--security-opt", "no-new-privileges", "--memory", str(memory),
            "--memory-swap", str(memory), "--pids-limit", str(limits["processes"]), *ulimits, "--entrypoint", "/bin/sh",
            *options, self._image.name, "-c", IDLE,
        ]  # fmt: skip
        try:
            await self._call(*words)
        except BaseException:
            self.release = lambda: None
            await self.close()
            raise

    async def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] = NONE,
        cwd: str = "",
        files: Mapping[str, Path] = NONE,
        together: bool = False,
    ) -> Program:
        if not self._fresh:
            await self._restart()
        self._fresh = False
        place, variables = os.path.join("/", self.cwd, cwd), {**self.environment, **env}
        options = [word for pair in variables.items() for word in ("-e", "=".join(pair))]
        enter = ["/bin/sh", "-c", ENTER, "sh", place, *words]
        command = [self._image.engine, "exec", "-i", *options, self._name, *enter]
        if not self._broken:
            await self._prepare(files)
        if broken := self._broken:  # by an earlier program
            command = ["sh", "-c", f"exit {NOT_STARTED}"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT if together else pipe,
            limit=LINE_BYTES,
            cwd=self._base,  # where conmon leaves a file when memory runs out
        )
        assert process.stdin is not None and process.stdout is not None
        killed = False

        async def end() -> tuple[int, str]:
            code = await process.wait()
            if code > 0 and not (broken or killed or self._closed):
                state = await self._state()
                if not killed:
                    _ended(state)
            return code if code >= 0 else KILLED, ""

        async def kill() -> None:
            nonlocal killed
            killed = True
            process.kill()  # the engine's command, so that it prints no error
            await self._restart()

        streams = process.stdin, process.stdout, process.stderr or process.stdout
        return Program(streams, end(), kill)

    async def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        words = [self._image.engine, "cp", f"{self._name}:{os.path.join('/', self.cwd, path)}", "-"]
        content = await asyncio.to_thread(_first_file, words, limit)
        if content is None:
            await self._state()  # the engine works, so there is no such file
        return content

    async def write(self, path: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._base) as file:
            file.write(content)
            file.flush()
            os.chmod(file.fileno(), 0o644)
            await self._put({os.path.join("/", self.cwd, path): Path(file.name)})

    async def changes(self, limit: int = 1 << 16) -> str:
        """Return the paths that were added (A), changed (C) or deleted (D), one a line."""
        text = (await self._call("diff", self._name)).decode(errors="replace")
        return text if len(text) <= limit else f"{text[:limit]}\n[... the rest is omitted ...]\n"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._gate:
                self._gate.close()
            await self._call("rm", "-f", self._name)
        finally:
            self.release()

    async def _prepare(self, files: Mapping[str, Path]) -> None:
        """Replace the files of the start before, and open the ports, unless what a program did is in the way."""
        places = [*self._files, *files]
        try:
            if places:
                await self._call("exec", self._name, "/bin/sh", "-c", CLEAR, "sh", *places)
            if files:
                await self._put(files)
        except WorkspaceError:
            _ended(await self._state())
            await self.write(f"/.{secrets.token_hex(8)}", b"-")  # the engine works
            self._files, self._broken = places, True
            return
        self._files = [*files]
        if self._doors["sockets"] or self._doors["network"]:
            state = await self._state()
            self._broken = _ended(state)
            if not self._broken:
                self._gate, answers = await self._ask({"container": state["Pid"], **self._doors})
                await message(answers, "ports")

    async def _restart(self) -> None:
        """End all processes. What a program removed may keep the container from starting again."""
        if self._gate:
            self._gate.close()
        self._broken = False
        try:
            await self._call("restart", self._name)
        except WorkspaceError:
            await self._state()  # the engine works
            self._broken = True
        self._fresh = True

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(await self._call("inspect", self._name))[0]["State"]
        return state

    async def _put(self, files: Mapping[str, Path]) -> None:
        """Copy files and directories of the host by their places inside, with what their links lead to."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            for place, source in files.items():
                tar.add(source, place, filter=_of_root)
        await self._call("cp", "-", f"{self._name}:/", data=archive.getvalue())

    async def _call(self, *words: str, data: bytes = b"") -> bytes:
        return await _output(self._image.engine, *words, data=data)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _ended(state: Mapping[str, Any]) -> bool:
    """Return whether a container ended by what runs in it. Raises WorkspaceError if a signal from outside ended it."""
    if not state["Running"] and state["ExitCode"] > 128 and not state["OOMKilled"]:
        raise WorkspaceError("run: the container was stopped from outside")
    return not state["Running"]


async def _output(engine: str, *words: str, data: bytes = b"") -> bytes:
    """Return what a command of the engine prints. Raises WorkspaceError if it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(engine, *words, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(process.communicate(data), WAIT_S.get(words[0], ANSWER_S))
    except TimeoutError:
        process.kill()
        raise WorkspaceError(f"{engine} {words[0]}: no answer in time") from None
    if process.returncode:
        raise WorkspaceError(f"{engine} {words[0]}: {errors.decode(errors='replace').strip()[-300:]}")
    return output


def _first_file(words: Sequence[str], limit: int) -> bytes | None:
    """Return the beginning of the regular file in the archive that a command prints, or None."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                file = tar.extractfile(tar.next() or tarfile.TarInfo())
                return file.read(limit) if file else None
        except (tarfile.TarError, KeyError):  # there is none, or it is a link
            return None
        finally:
            process.kill()
