"""Publishing the adapter alone: megabytes instead of the whole model, and requests need not stop for it."""

from __future__ import annotations

import asyncio

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import WeightRef
from rl4llm.sync.store import WeightStore


class LoraPublisher(BasePublisher):
    """Hands over an adapter's directory, which every server reads under the same absolute path.

    The servers' own weights must be those of the trainer's frozen model; the canary finds out when they are not.
    """

    def __init__(self, client: BaseClient, store: WeightStore):
        self._client = client
        self._store = store

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have all servers hold `version`; raises WeightsError when it cannot be written whole, and EngineError."""
        weight_ref = await asyncio.to_thread(self.write, backend, version)
        with self._store.lease(version):
            await self._client.load(weight_ref)
        return weight_ref

    def write(self, backend: BaseBackend, version: int) -> WeightRef:
        """Put a version into the store, and read it back."""
        adapter = backend.adapter
        if adapter is None:
            raise ConfigError("sync.name=lora needs an adapter. Set model.lora.rank, e.g. to 16, or leave sync.name out.")
        weight_ref = self._store.write(version, adapter.specs(), adapter.weights(), adapter.write_config, kind="lora")
        self._store.verify(weight_ref)
        return weight_ref

    async def close(self) -> None:
        self._store.close()
