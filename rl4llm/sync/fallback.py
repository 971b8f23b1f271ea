"""Another way for weights when the first one fails: taken, counted and reported, never in silence."""

from __future__ import annotations

from collections.abc import Callable

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import EngineError, EnginesDownError
from rl4llm.core.types import WeightRef


class FallbackPublisher(BasePublisher):
    """Publishes the first way; when an engine refuses it, the second way, for this version only."""

    def __init__(self, first: BasePublisher, second: BasePublisher, warn: Callable[[str], None]):
        self._first, self._second, self._warn = first, second, warn
        self.taken = 0

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        try:
            return await self._first.publish(backend, version)
        except EnginesDownError:  # no way leads to servers that are not there
            raise
        except EngineError as error:
            self.taken += 1
            self._warn(f"Version {version} went the fallback way (sync.fallback), since the first one failed: {error}")
            return await self._second.publish(backend, version)

    async def lend_device(self, backend: BaseBackend) -> None:
        await self._first.lend_device(backend)

    def follow(self, backend: BaseBackend) -> None:
        self._first.follow(backend)

    async def close(self) -> None:
        await self._first.close()
        await self._second.close()
