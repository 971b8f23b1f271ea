"""One trainer at a time gives a server its weights: two would overwrite each other's, and sample from the wrong ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import EngineError, RunDirError
from rl4llm.core.lock import DirectoryLock
from rl4llm.core.types import WeightRef

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ClaimingPublisher(BasePublisher):
    """Claims servers with its first version and until `close`; a claim ends with its process, however that ends.

    Claims are files of this machine and user: a server that trainers on several machines reach is not guarded. Of a run's
    ranks the first one publishes, and alone claims.
    """

    def __init__(self, publisher: BasePublisher, urls: Sequence[str], root: Path | None = None):
        self._publisher = publisher
        self._urls = urls
        self._root = root or Path(tempfile.gettempdir()) / f"rl4llm-{os.getuid()}" / "servers"
        self._claims: list[DirectoryLock] = []

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """As the publisher inside does; raises EngineError when somebody else has claimed one of the servers."""
        self._claim()
        return await self._publisher.publish(backend, version)

    async def lend_device(self, backend: BaseBackend) -> None:
        self._claim()
        await self._publisher.lend_device(backend)

    def follow(self, backend: BaseBackend) -> None:
        self._publisher.follow(backend)

    async def close(self) -> None:
        try:
            await self._publisher.close()
        finally:
            for claim in self._claims:
                claim.release()
            self._claims = []

    def _claim(self) -> None:
        for url in self._urls[len(self._claims) :]:
            directory = self._root / _name(url)
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._claims.append(DirectoryLock(directory))
            except RunDirError as error:
                reason, _, _ = str(error).partition(" Next: ")
                raise EngineError(
                    f"Another run gives the server at {url} its weights: {reason} Next: wait for that one, or start another "
                    "server and name it with inference.url. `rl4llm eval` can do without: inference.name=local, and no url."
                ) from error
            except OSError as error:
                raise EngineError(
                    f"The server at {url} cannot be claimed for this run: {error}. Next: set TMPDIR to a directory that may "
                    "be written to."
                ) from error


def _name(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{'localhost' if host in LOOPBACK else host}-{parts.port or parts.scheme}"
