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
from typing import Any, Literal

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Count, checked
from rl4llm.extensions.workspaces import containers, dockerfile, images
from rl4llm.extensions.workspaces.containers import Container
from rl4llm.extensions.workspaces.keeper import LOCK, program, remove_all
from rl4llm.extensions.workspaces.mounted import ANSWER_S, Mounted, message, reader
from rl4llm.extensions.workspaces.network import PROXY_PORT, proxy_environment
from rl4llm.extensions.workspaces.orders import send
from rl4llm.extensions.workspaces.start import ZERO, find_bwrap
from rl4llm.extensions.workspaces.workspace import Workspace, WorkspaceError

PREFIX = "rl4llm-workspaces-"
PLACE_CHECK_S = 0.01
ZERO_BYTES = 1 << 40
BUILD_BYTES = 64 << 30  # that a Dockerfile may add


class Workspaces:
    """Workspaces with the same image and limits; `count` are open at once.

    Args:
        image: "host" for the machine's own /usr, a directory, a tar of a file system (also compressed), an OCI layout, or a
            directory with a Dockerfile. With podman or docker, what they can run, or a directory with a Dockerfile.
        engine: "bwrap" mounts images and isolates programs itself; "podman" and "docker" run a container per workspace, with
            their isolation, which do not bound the disk and list changes by path.
        network: names of hosts that programs reach over HTTP and HTTPS, through a proxy that is announced to them.
        mounts: directories of the host that are bound read-only, "DIR" at the same place or "DIR:PLACE".
        memory_bytes: memory of all processes of a workspace together.
        processes: number of processes of a workspace.
        disk_bytes: size of the files that differ from the image; each counts at least 4 KiB.
        count: number of workspaces that are open at once; `open` waits for a free place.

    Nothing starts before the first `open`. Every failure of the machine raises WorkspaceError.
    """

    @checked("workspace")
    def __init__(
        self,
        *,
        image: str = "host",
        engine: Literal["bwrap", "podman", "docker"] = "bwrap",
        network: Sequence[str] = (),
        mounts: Sequence[str] = (),
        memory_bytes: Count = 1 << 30,
        processes: Count = 256,
        disk_bytes: Count = 1 << 30,
        count: Count = 16,
    ):
        self.image, self._engine = image, engine
        self._bwrap = find_bwrap()
        if engine == "bwrap":
            if self._bwrap is None:
                raise ConfigError("env.workspace needs bubblewrap. Install it: apt-get install bubblewrap.")
            images.locate(image)
        self._limits = {"memory_bytes": memory_bytes, "processes": processes, "disk_bytes": disk_bytes}
        self._network = list(network)
        self._mounts = tuple(map(_mount, mounts))
        self._images: dict[str, Any] = {}
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
            below = await self._prepared(image or self.image)
            opened = self._mounted if self._engine == "bwrap" else self._container
            return await opened(below, sockets or {}, self._limits, self._places.release)
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End all workspaces, and remove them; a later `open` starts again."""
        with self._starting:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    async def _prepared(self, name: str) -> Any:
        await _acquired(self._lock)
        try:
            if name not in self._images:
                self._images[name] = await self._image(name)
            return self._images[name]
        except OSError as error:
            raise WorkspaceError(f"unpack: {name}: {error}") from error
        finally:
            self._lock.release()

    async def _image(self, name: str) -> Any:
        if self._engine != "bwrap":
            return await containers.prepare(self._engine, name)
        if name == "host" or not (images.locate(name) / "Dockerfile").is_file():
            below = await asyncio.to_thread(images.prepare, name)
        else:
            limits = {**self._limits, "disk_bytes": BUILD_BYTES}
            below = await dockerfile.build(name, lambda below: self._mounted(below, {}, limits, lambda: None))
        return replace(below, binds=(*below.binds, *self._mounts))

    async def _mounted(
        self,
        image: images.Image,
        sockets: Mapping[int, str],
        limits: Mapping[str, int],
        release: Callable[[], None],
    ) -> Mounted:
        keeper = await asyncio.to_thread(self._running_keeper)
        directory = await asyncio.to_thread(_new_directory, keeper.base)
        doors, variables = self._doors(sockets)
        order = {
            "directory": str(directory), "lower": str(image.root), "binds": image.binds, "cwd": image.cwd,
            "bwrap": self._bwrap, **doors, **limits,
        }  # fmt: skip
        control, gone = await keeper.ask(order)
        image = replace(image, environment={**images.ENVIRONMENT, **variables, **image.environment})
        workspace = Mounted(control, gone, directory, image, release)
        try:
            await message(gone, "open")
        except BaseException:
            workspace.release = lambda: None  # `open` does it
            await workspace.close()
            raise
        return workspace

    async def _container(
        self,
        image: containers.Image,
        sockets: Mapping[int, str],
        limits: Mapping[str, int],
        release: Callable[[], None],
    ) -> Container:
        keeper, (doors, variables) = await asyncio.to_thread(self._running_keeper), self._doors(sockets)
        image = replace(image, environment={**variables, **image.environment})
        options = [word for source, place in self._mounts for word in ("-v", f"{source}:{place}:ro")]
        container = Container(image, keeper.base, keeper.ask, doors, release)
        await container.create(limits, options)
        return container

    def _doors(self, sockets: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the part of an order that says where ports lead, and the variables that announce the proxy."""
        free = (port for port in itertools.count(PROXY_PORT) if port not in sockets)
        proxy = next(free) if self._network else 0
        targets = {str(port): target for port, target in sockets.items()}
        doors = {"sockets": targets, "network": self._network, "proxy": proxy}
        return doors, proxy_environment(proxy) if proxy else {}

    def _running_keeper(self) -> _Keeper:
        with self._starting:
            if self._keeper is None or not self._keeper.runs():
                self._keeper = _Keeper(self._engine)
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

    def __init__(self, engine: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{engine}-"))
        self._removal = containers.removal(engine, self.base)
        _sweep(engine)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                program("keeper", str(os.getpid()), str(self.base), *self._removal),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, self._control.close)

    def runs(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    async def ask(self, order: Mapping[str, object]) -> tuple[socket.socket, asyncio.StreamReader]:
        """Send an order; return the connection to what it started, and where its answers come."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers, reply = os.pipe()
        try:
            with theirs:
                send(self._control, order, reply, theirs.fileno())
        except OSError as error:
            ours.close()
            raise WorkspaceError(f"open: the keeper of the workspaces ended ({error})") from error
        finally:
            os.close(reply)
        return ours, await reader(answers)

    def close(self) -> None:
        self._control.close()
        self._process.wait(ANSWER_S)
        if self.base.exists():  # the keeper was killed
            remove_all(str(self.base), self._removal)


def _sweep(engine: str) -> None:
    """Remove the directories and containers of this user's pools of an engine whose processes were all killed."""
    for base in Path(tempfile.gettempdir()).glob(f"{PREFIX}{engine}-*"):
        with suppress(OSError):
            if base.lstat().st_uid == os.getuid():
                with open(base / LOCK) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_all(str(base), containers.removal(engine, base))


def _mount(text: str) -> tuple[str, str]:
    """Return the source and the place of a mount."""
    source, _, place = text.partition(":")
    source = os.path.abspath(os.path.expanduser(source))
    if not os.path.isdir(source):
        raise ConfigError(f"workspace.mounts: {source} is not a directory.")
    return source, place or source
