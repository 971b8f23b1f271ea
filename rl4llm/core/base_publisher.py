"""The contract of publishers: from the trainer's weights to engines that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.types import WeightRef


class BasePublisher(ABC):
    """One kind of weight sync. It does not trust the answer of an engine; the log-prob parity check runs afterwards."""

    @abstractmethod
    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Load the backend's weights as `version` into every engine; raise EngineError or WeightsError."""

    async def lend_device(self, backend: BaseBackend) -> None:
        """Free the device for the trainer: engines that share it release memory. May be called again at any time."""

    def take_device(self, backend: BaseBackend) -> None:
        """Do what every other rank must do after `lend_device` of the first one."""

    def follow(self, backend: BaseBackend) -> None:
        """Do what every other rank must do after the first one has published and all weights are gathered."""

    async def close(self) -> None:
        """Release what publishing needed."""
