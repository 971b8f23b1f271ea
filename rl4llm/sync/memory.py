"""Weight sync in one process: the embedded engine reads the very tensors that the optimizer updates, if they are whole."""

from __future__ import annotations

from typing import Any

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import TakesWeights
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.types import WeightRef


class MemoryPublisher(BasePublisher):
    """Announces a new version to an engine in this process, which shares the trainer's weights.

    If this rank holds only a part of the weights, the engine has a separate model, and gets a copy of all of them.
    """

    def __init__(self, client: TakesWeights):
        self._client = client

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have the engine report `version` with every token; copy the weights if it does not share them."""
        weight_ref = WeightRef(version, "memory", tensors=None if backend.whole else backend.own_weights)
        await self._client.load(weight_ref)
        return weight_ref


def in_memory(client: TakesWeights, store: Any, tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=memory, which needs neither a store nor a tokenizer."""
    return MemoryPublisher(client)
