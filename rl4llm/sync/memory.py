"""Publishing without a copy: the embedded engine reads the very tensors that the optimizer updates."""

from __future__ import annotations

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.types import WeightRef


class MemoryPublisher(BasePublisher):
    """Tells an engine in this process that the weights it shares with the trainer are a new version."""

    def __init__(self, client: BaseClient):
        self._client = client

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Make `version` the one that the engine reports with every token."""
        weight_ref = WeightRef(version, "memory")
        await self._client.load(weight_ref)
        return weight_ref
