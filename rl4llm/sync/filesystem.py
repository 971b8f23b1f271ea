"""Publishing through a file system that trainer and servers share: write a version, verify it, have every server load it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.types import WeightRef
from rl4llm.sync.store import WeightStore


class FilesystemPublisher(BasePublisher):
    """Hands over weights as a directory that every server can read under the same absolute path.

    `save_tokenizer` writes the tokenizer's files, so that a server can be started from a version.
    """

    def __init__(self, client: BaseClient, store: WeightStore, save_tokenizer: Callable[[Path], object] = lambda _: None):
        self._client = client
        self._store = store
        self._save_tokenizer = save_tokenizer

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have all servers hold `version`; raises WeightsError when it cannot be written whole, and EngineError."""
        weight_ref = await asyncio.to_thread(self.write, backend, version)
        await self.hand_over(weight_ref)
        return weight_ref

    async def hand_over(self, weight_ref: WeightRef) -> None:
        """Have all servers load a version of the store, which is kept as long as that takes."""
        with self._store.lease(weight_ref.version):
            await self._client.load(weight_ref)

    async def close(self) -> None:
        """Let the store's directory go."""
        self._store.close()

    def write(self, backend: BaseBackend, version: int) -> WeightRef:
        """Put a version into the store, and read it back."""
        weight_ref = self._store.write(version, backend.weight_specs(), backend.weights(), self._write_config(backend))
        self._store.verify(weight_ref)
        return weight_ref

    def _write_config(self, backend: BaseBackend) -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            backend.write_config(directory)
            self._save_tokenizer(directory)

        return write
