"""Publishing in one process: the embedded engine reads the very tensors that the optimizer updates, where they are whole."""

from __future__ import annotations

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.types import WeightRef


class MemoryPublisher(BasePublisher):
    """Tells an engine in this process that the weights it shares with the trainer are a new version.

    Where this rank holds a part of them only, the engine has a model of its own, and is given all of them.
    """

    def __init__(self, client: BaseClient):
        self._client = client

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Make `version` the one that the engine reports with every token."""
        weight_ref = WeightRef(version, "memory", tensors=None if backend.whole else backend.weights)
        await self._client.load(weight_ref)
        return weight_ref
