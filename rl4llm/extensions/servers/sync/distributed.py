"""Weight sync without files: the trainer broadcasts the tensors in a process group with all servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BasePublisher, TakesWeights
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.sync.store import WeightStore, checked, narrowed


class BroadcastPublisher(BasePublisher):
    """Publishes one bucket of tensors at a time; float32 matrices are sent in `dtype`, as `WeightStore` writes them."""

    def __init__(self, client: TakesWeights, dtype: torch.dtype = torch.float32):
        self._client, self._dtype = client, dtype

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have all engines load the tensors.

        Raises WeightsError, before any request, for tensors that are not finite or do not match the model's list.
        """
        specs = backend.weight_specs()
        deque(checked(*narrowed(specs, backend.weights(), self._dtype)), maxlen=0)
        weight_ref = WeightRef(
            version, "distributed", tensors=lambda: narrowed(specs, backend.weights(), self._dtype)[1]
        )
        await self._client.load(weight_ref)
        return weight_ref


def over_broadcast(client: TakesWeights, store: Callable[[], WeightStore], tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=distributed."""
    return BroadcastPublisher(client, store().dtype)
