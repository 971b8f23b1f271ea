"""The pool of workspaces: its options, how many are open at once, and the process that keeps them."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Count, checked
from rl4llm.extensions.workspaces import dockerfile, images
from rl4llm.extensions.workspaces.keeper import LOCK, program, remove
from rl4llm.extensions.workspaces.network import PROXY_PORT, proxy_environment
from rl4llm.extensions.workspaces.start import ZERO, find_bwrap
from rl4llm.extensions.workspaces.workspace import ANSWER_S, Workspace, WorkspaceError, message, reader, send

PREFIX = "rl4llm-workspaces-"
PLACE_CHECK_S = 0.01
ZERO_BYTES = 1 << 40
BUILD_BYTES = 64 << 30  # that a Dockerfile may add


class Workspaces:
    """Workspaces with the same image and limits; `count` are open at once.

    Args:
        image: "host" for the machine's own /usr, a directory, a tar of a file system (also compressed), a directory with an
            OCI layout or with a Dockerfile, or a name that podman or docker knows.
        network: names of hosts that programs reach over HTTP and HTTPS, through a proxy that is announced to them.
        mounts: directories of the host that are bound read-only, "DIR" at the same place or "DIR:PLACE".
        memory_bytes: memory of all processes of a workspace together.
        processes: number of processes of a workspace.
        disk_bytes: size of the files that differ from the image; each counts at least 4 KiB.
        output_bytes: bytes of a program's output in a result.
        count: number of workspaces that are open at once; `open` waits for a free place.

    Nothing starts before the first `open`. Every failure of the machine raises WorkspaceError.
    """

    @checked("workspace")
    def __init__(
        self,
        *,
        image: str = "host",
        network: Sequence[str] = (),
        mounts: Sequence[str] = (),
        memory_bytes: Count = 1 << 30,
        processes: Count = 256,
        disk_bytes: Count = 1 << 30,
        output_bytes: Count = 1 << 16,
        count: Count = 16,
    ):
        self.image = image
        if (bwrap := find_bwrap()) is None:
            raise ConfigError("env.workspace needs bubblewrap. Install it: apt-get install bubblewrap.")
        self._bwrap = bwrap
        images.kind_of(image)
        self._limits = {"memory_bytes": memory_bytes, "processes": processes, "disk_bytes": disk_bytes}
        self._network, self._output_bytes = list(network), output_bytes
        self._mounts = tuple(map(_mount, mounts))
        self._images: dict[str, images.Image] = {}
        self._places = threading.BoundedSemaphore(count)
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._keeper: _Keeper | None = None

    async def open(self, image: str | None = None, *, sockets: Mapping[int, str] | None = None) -> Workspace:
        """Return a new workspace, as soon as fewer than `count` are open.

        Args:
            image: by default the pool's.
            sockets: addresses of the host by the port that reaches them at 127.0.0.1 inside: a Unix socket's path, or
                "127.0.0.1:N". Nothing else of the host's network is reachable.

        Raises WorkspaceError, and ConfigError for an image that cannot be used.
        """
        await _acquired(self._places)
        try:
            lower = await self._prepared(image or self.image)
            shown = replace(lower, binds=(*lower.binds, *self._mounts))
            return await self._made(shown, sockets or {}, self._limits, self._places.release)
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End all workspaces, and remove them; a later `open` starts again."""
        with self._starting:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    async def _prepared(self, name: str) -> images.Image:
        await _acquired(self._lock)
        try:
            if name not in self._images:
                self._images[name] = await self._image(name)
            return self._images[name]
        except OSError as error:
            raise WorkspaceError(f"unpack: {name}: {error}") from error
        finally:
            self._lock.release()

    async def _image(self, name: str) -> images.Image:
        if images.kind_of(name) != "dockerfile":
            return await asyncio.to_thread(images.prepare, name)
        command = None if dockerfile.is_local(name) else await asyncio.to_thread(images.containers)
        if command:
            return await asyncio.to_thread(images.of_containers, name, [name])
        limits = {**self._limits, "disk_bytes": BUILD_BYTES}
        return await dockerfile.build(name, lambda below: self._made(below, {}, limits, lambda: None))

    async def _made(
        self,
        image: images.Image,
        sockets: Mapping[int, str],
        limits: Mapping[str, int],
        release: Callable[[], None],
    ) -> Workspace:
        keeper = await asyncio.to_thread(self._running_keeper)
        directory = await asyncio.to_thread(_new_directory, keeper.base)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end, reply = os.pipe()
        proxy = (
            next(port for port in itertools.count(PROXY_PORT) if port not in sockets) if self._network else 0
        )
        order = {
            "directory": str(directory), "lower": str(image.root), "binds": image.binds, "cwd": image.cwd,
            "sockets": {str(port): target for port, target in sockets.items()}, "network": self._network, "proxy": proxy,
            "bwrap": self._bwrap, **limits,
        }  # fmt: skip
        gone = await reader(end)
        try:
            with theirs:
                keeper.send(order, reply, theirs.fileno())
        finally:
            os.close(reply)
        variables = {**images.ENVIRONMENT, **(proxy_environment(proxy) if proxy else {}), **image.environment}
        workspace = Workspace(
            ours, gone, directory, (variables, image.cwd), self._output_bytes, _bring, release
        )
        try:
            await asyncio.wait_for(message(gone, "open"), ANSWER_S)
        except BaseException as error:
            workspace.release = lambda: None
            await workspace.close()
            if isinstance(error, TimeoutError):
                raise WorkspaceError(f"open: no answer in {ANSWER_S:g} s") from None
            raise
        return workspace

    def _running_keeper(self) -> _Keeper:
        with self._starting:
            if self._keeper is None or not self._keeper.runs():
                self._keeper = _Keeper()
            return self._keeper


async def _acquired(lock: threading.Lock | threading.BoundedSemaphore) -> None:
    """Acquire what coroutines of several event loops share."""
    while not lock.acquire(blocking=False):
        await asyncio.sleep(PLACE_CHECK_S)


def _new_directory(base: Path) -> Path:
    directory = base / secrets.token_hex(8)
    for path in (directory, *(directory / name for name in ("lower", "upper", "work", "merged"))):
        path.mkdir(mode=0o755)
    (directory / ZERO).touch(mode=0o644)
    os.truncate(directory / ZERO, ZERO_BYTES)
    images.own(directory)
    return directory


class _Keeper:
    """The keeper's process, with the directory of its workspaces."""

    def __init__(self) -> None:
        _sweep()
        self.base = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                program("keeper", str(os.getpid()), str(self.base)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, self._control.close)

    def runs(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def send(self, order: Mapping[str, object], *descriptors: int) -> None:
        try:
            send(self._control, order, *descriptors)
        except OSError as error:
            raise WorkspaceError(f"open: the keeper of the workspaces ended ({error})") from error

    def close(self) -> None:
        self._control.close()
        self._process.wait(ANSWER_S)
        remove(str(self.base))  # does nothing unless the keeper was killed


def _sweep() -> None:
    """Remove the directories of this user's pools whose processes were all killed."""
    for base in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if base.lstat().st_uid == os.getuid():
                with open(base / LOCK) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(str(base))


async def _bring(source: Path, target: Path) -> None:
    """Copy a file or a directory of the host, and what its links lead to, to where a holder may read it."""

    def copy() -> None:
        try:
            subprocess.run(["cp", "-aL", "--reflink=auto", source, target], check=True, capture_output=True)
            images.own(target)
        except (OSError, subprocess.CalledProcessError) as error:
            raise WorkspaceError(
                f"start: {source} cannot be copied: {getattr(error, 'stderr', error)!r}"
            ) from error

    await asyncio.to_thread(copy)


def _mount(text: str) -> tuple[str, str]:
    """Return the source and the place of a mount."""
    source, _, place = text.partition(":")
    source = os.path.abspath(os.path.expanduser(source))
    if not os.path.isdir(source):
        raise ConfigError(f"workspace.mounts: {source} is not a directory.")
    return source, place or source
