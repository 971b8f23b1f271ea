"""The contract of publishers: from the trainer's weights to engines that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.types import WeightRef


class BasePublisher(ABC):
    """One way for weights to reach the engines. What an engine answers is not believed; the canary asks it afterwards."""

    @abstractmethod
    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have every engine take over the backend's weights as `version`; raises EngineError or WeightsError."""

    async def lend_device(self, backend: BaseBackend) -> None:
        """The trainer is about to compute; engines that share its device make room. May be called again at any time."""

    def follow(self, backend: BaseBackend) -> None:
        """What every other rank does when the first one has published; its share of the weights is given by then."""

    async def close(self) -> None:
        """Release what publishing needed."""
