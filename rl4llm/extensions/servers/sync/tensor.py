"""Weight sync without files: tensors are sent to the engines in requests, or through a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BasePublisher, TakesWeights
from rl4llm.core.types import WeightRef
from rl4llm.extensions.servers.sync.store import WeightStore, check_tensors, narrowed


class TensorPublisher(BasePublisher):
    """Publishes weights one bucket of tensors at a time.

    `kind` "tensor" sends them in requests: by value from a CPU, as CUDA IPC handles if server and trainer share a GPU.
    "distributed" broadcasts them in a process group with all servers. Float32 matrices are sent in `dtype`, as `WeightStore`
    writes them.
    """

    def __init__(
        self, client: TakesWeights, kind: Literal["tensor", "distributed"], dtype: torch.dtype = torch.float32
    ):
        self._client = client
        self._kind = kind
        self._dtype = dtype

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have all engines load the tensors.

        Raises WeightsError, before any request, for tensors that are not finite or do not match the model's list.
        """
        specs = backend.weight_specs()
        check_tensors(*narrowed(specs, backend.weights(), self._dtype))
        weight_ref = WeightRef(
            version, self._kind, tensors=lambda: narrowed(specs, backend.weights(), self._dtype)[1]
        )
        await self._client.load(weight_ref)
        return weight_ref


def over_requests(client: TakesWeights, store: Callable[[], WeightStore], tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=tensor."""
    return TensorPublisher(client, "tensor", store().dtype)


def over_broadcast(client: TakesWeights, store: Callable[[], WeightStore], tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=distributed."""
    return TensorPublisher(client, "distributed", store().dtype)
