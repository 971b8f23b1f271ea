"""Publishing without files: engines are handed the tensors themselves, in requests or through a process group."""

from __future__ import annotations

from typing import Literal

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.types import WeightRef
from rl4llm.sync.shards import check_tensors


class TensorPublisher(BasePublisher):
    """Hands over weights one bucket of tensors at a time.

    `kind` "tensor" puts them into requests: inline from a CPU, as CUDA IPC handles when server and trainer share a GPU.
    "distributed" broadcasts them in a process group with each server.
    """

    def __init__(self, client: BaseClient, kind: Literal["tensor", "distributed"]):
        self._client = client
        self._kind = kind

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have all engines take over the tensors; raises WeightsError, before any engine is asked, when one of them is not
        finite or not the model's."""
        check_tensors(backend.weight_specs(), backend.weights())
        weight_ref = WeightRef(version, self._kind, tensors=backend.weights)
        await self._client.load(weight_ref)
        return weight_ref
