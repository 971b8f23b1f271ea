"""One GPU for trainer and engine: whoever does not work gives its memory away, in one order and no other.

    rollout -> engine sleeps -> trainer takes the device -> update -> trainer leaves the device
            -> engine wakes its weights -> load -> engine wakes its cache -> rollout

Between waking and loading the engine holds whatever was in that memory. It answers all the same, so the order is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.sync.filesystem import FilesystemPublisher

WEIGHTS, CACHE = "weights", "kv_cache"


class State(Enum):
    """Where the engine is on its way."""

    READY = "ready"
    ASLEEP = "asleep"
    EMPTY = "awake, without weights"
    LOADED = "loaded, without a cache"


class CohostedClient(BaseClient):
    """An engine that shares its device with the trainer; refuses whatever is out of order with an EngineError."""

    def __init__(self, client: BaseClient):
        self._client = client
        self.context_length, self.vocab_size = client.context_length, client.vocab_size
        self.state = State.READY

    def __str__(self) -> str:
        return str(self._client)

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self._demand("generate", State.READY)
        return await self._client.generate(prompt_ids, sampling_params, session=session)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._demand("score", State.READY)
        return await self._client.score(token_ids)

    async def load(self, weight_ref: WeightRef) -> None:
        self._demand("load", State.EMPTY, State.LOADED, State.READY)
        await self._client.load(weight_ref)
        if self.state is State.EMPTY:
            self.state = State.LOADED

    async def version(self) -> int:
        return await self._client.version()

    async def sleep(self, tags: Sequence[str] = (WEIGHTS, CACHE)) -> None:
        self._demand("sleep", State.READY)
        await self._client.sleep(tags)
        self.state = State.ASLEEP

    async def wake(self, tags: Sequence[str] = (WEIGHTS, CACHE)) -> None:
        """The weights first, to be loaded; the cache when they are."""
        if tuple(tags) == (WEIGHTS,):
            self._demand("wake weights", State.ASLEEP)
            await self._client.wake(tags)
            self.state = State.EMPTY
        elif tuple(tags) == (CACHE,):
            self._demand("wake kv_cache", State.LOADED)
            await self._client.wake(tags)
            self.state = State.READY
        else:
            raise EngineError(f"wake: tags={tuple(tags)} is not accepted on a shared device: weights, then kv_cache.")

    async def pause(self) -> None:
        await self._client.pause()

    async def resume(self) -> None:
        await self._client.resume()

    async def expect(self, session: str) -> None:
        await self._client.expect(session)

    async def park(self, session: str) -> None:
        await self._client.park(session)

    async def release(self, session: str) -> None:
        await self._client.release(session)

    async def health(self) -> dict[str, Any]:
        return {**await self._client.health(), "state": self.state.value}

    async def disconnect(self) -> None:
        await self._client.disconnect()

    async def close(self) -> None:
        await self._client.close()

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._client.report_to(warn)

    def metrics(self) -> dict[str, float]:
        return self._client.metrics()

    def engines(self) -> Sequence[BaseClient]:
        return self._client.engines()

    def _demand(self, what: str, *states: State) -> None:
        if self.state not in states:
            accepted = " or ".join(state.value for state in states)
            raise EngineError(f"{self} is {self.state.value}, so it cannot {what}; it must be {accepted}.")


class CohostPublisher(BasePublisher):
    """Hands weights over through files, since the trainer leaves the device before the engine wakes."""

    def __init__(self, client: CohostedClient, files: FilesystemPublisher):
        self._client = client
        self._files = files

    async def lend_device(self, backend: BaseBackend) -> None:
        if self._client.state is State.READY:
            await self._client.sleep((WEIGHTS, CACHE))
            backend.onload()

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        await self.lend_device(backend)
        weight_ref = self._files.write(backend, version)
        backend.offload()
        await self._client.wake((WEIGHTS,))
        await self._files.hand_over(weight_ref)
        await self._client.wake((CACHE,))
        return weight_ref

    def follow(self, backend: BaseBackend) -> None:
        backend.offload()

    async def close(self) -> None:
        """Let the directory of the files go."""
        await self._files.close()
