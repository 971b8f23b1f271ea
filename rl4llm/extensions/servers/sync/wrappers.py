"""Publishers around publishers: claim the servers, fall back when publishing fails, or share the device with an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BasePublisher, LendsDevice
from rl4llm.core.errors import EngineError, EnginesDownError, RunDirError
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.fleet.cohosted import CohostedFleet
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.runs.lock import DirectoryLock, private_directory
from rl4llm.runtime.runner import run

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Claims:
    """Servers that this process has claimed: two trainers would overwrite each other's weights.

    A claim ends with its process, however that ends. Claims are files of this machine and user, so a server is not protected
    from trainers on other machines.
    """

    def __init__(self, urls: Sequence[str], root: Path | None = None):
        self._urls = urls
        self._root = root
        self._locks: list[DirectoryLock] = []

    def take(self) -> None:
        """Claim the servers that are not claimed yet; raise EngineError if another run has one of them."""
        for url in self._urls[len(self._locks) :]:
            try:
                directory = (self._root or private_directory() / "servers") / _name(url)
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._locks.append(DirectoryLock(directory))
            except RunDirError as error:
                raise EngineError(
                    f"Another run uses the server at {url}: {error} Wait for that run, or set another inference.url."
                ) from error

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []


class WrappingPublisher(BasePublisher):
    """A publisher around another one."""

    def __init__(self, publisher: BasePublisher):
        self._publisher = publisher

    async def lend_device(self, backend: BaseBackend) -> None:
        await self._publisher.lend_device(backend)

    def take_device(self, backend: BaseBackend) -> None:
        self._publisher.take_device(backend)

    def follow(self, backend: BaseBackend) -> None:
        self._publisher.follow(backend)

    async def close(self) -> None:
        await self._publisher.close()


class ClaimingPublisher(WrappingPublisher):
    """Claims servers with its first version and until `close`. Only the first rank of a run publishes, and claims."""

    def __init__(self, publisher: BasePublisher, urls: Sequence[str], root: Path | None = None):
        super().__init__(publisher)
        self._claims = Claims(urls, root)

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Publish with the inner publisher; raise EngineError if another run has claimed one of the servers."""
        self._claims.take()
        return await self._publisher.publish(backend, version)

    async def lend_device(self, backend: BaseBackend) -> None:
        self._claims.take()
        await super().lend_device(backend)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._claims.release()


class FallbackPublisher(WrappingPublisher):
    """Publishes with the first publisher; if an engine refuses, with the second, for this version only, with a warning."""

    def __init__(self, publisher: BasePublisher, second: BasePublisher, warn: Callable[[str], None]):
        super().__init__(publisher)
        self._second, self._warn = second, warn
        self.taken = 0

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        try:
            return await self._publisher.publish(backend, version)
        except EnginesDownError:  # the second cannot reach them either
            raise
        except EngineError as error:
            self.taken += 1
            self._warn(f"Version {version} was published with sync.fallback, since sync.name failed: {error}")
            return await self._second.publish(backend, version)

    async def close(self) -> None:
        await super().close()
        await self._second.close()


class CohostPublisher(BasePublisher):
    """Shares one GPU between trainer and engine: the one that is idle frees its memory, in exactly this order.

        rollout -> engine sleeps -> trainer takes the device -> update -> trainer leaves the device
                -> engine wakes its weights -> load -> engine wakes its cache -> rollout

    Weights go through files, since the trainer's models leave the device before the engine wakes: the one that is
    published, and `others` beside it, a critic or a reference.
    """

    def __init__(self, client: LendsDevice, files: FilesystemPublisher, others: Sequence[BaseBackend] = ()):
        self._client = client
        self._files = files
        self._others = others

    async def lend_device(self, backend: BaseBackend) -> None:
        if self._client.awake:
            await self._client.sleep(("weights", "kv_cache"))
            self.take_device(backend)

    def take_device(self, backend: BaseBackend) -> None:
        for model in (backend, *self._others):
            model.onload()

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        await self.lend_device(backend)
        weight_ref = self._files.write(backend, version)
        self.follow(backend)
        await self._client.wake(("weights",))
        await self._files.hand_over(weight_ref)
        await self._client.wake(("kv_cache",))
        return weight_ref

    def follow(self, backend: BaseBackend) -> None:
        for model in (backend, *self._others):
            model.offload()

    async def close(self) -> None:
        """Release the directory of the weights."""
        await self._files.close()


def free_device(client: CohostedFleet, urls: Sequence[str]) -> None:
    """Have servers that share the trainer's device sleep, before any of its models is there.

    They may sleep already, since the run before this one was killed.
    """
    claims = Claims(urls)

    async def free() -> None:
        try:
            await client.sleep()
        finally:
            await client.disconnect()

    claims.take()  # for this moment; the publisher of the run claims them again
    try:
        run(free())
    finally:
        claims.release()


def _name(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{'localhost' if host in LOOPBACK else host}-{parts.port or parts.scheme}"
