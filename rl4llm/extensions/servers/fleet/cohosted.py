"""Servers on the trainer's device: they sleep while it computes, and get no request before they hold its weights again.

Between waking and loading, an engine holds arbitrary memory as weights, but would answer requests. This class prevents that.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import Any

from rl4llm.core.errors import EngineError
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.fleet.fleet import FleetClient, T
from rl4llm.extensions.servers.fleet.member import Member, Trip


class DeviceState(Enum):
    """Which parts of the engine are on the device."""

    READY = "ready"
    ASLEEP = "asleep"
    EMPTY = "awake, without weights"
    LOADED = "loaded, without a cache"


class CohostedFleet(FleetClient):
    """A fleet that shares its device with the trainer; a call out of order raises EngineError."""

    state = DeviceState.READY

    @property
    def awake(self) -> bool:
        return self.state is DeviceState.READY

    async def _deliver(self, trip: Trip, ask: Callable[[Member], Coroutine[Any, Any, T]]) -> T:
        self._demand("answer", DeviceState.READY)
        return await super()._deliver(trip, ask)

    async def load(self, weight_ref: WeightRef) -> None:
        self._demand("load", DeviceState.EMPTY, DeviceState.LOADED, DeviceState.READY)
        await super().load(weight_ref)
        if self.state is DeviceState.EMPTY:
            self.state = DeviceState.LOADED

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free the device, once every server is there: one that starts later would take the memory that the trainer uses."""
        self._demand("sleep", DeviceState.READY)
        await self.version()
        await self._pool.wait(lambda: all(member.up for member in self._servers))
        await super().sleep(tags)
        self.state = DeviceState.ASLEEP

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Wake the weights first, so that they can be loaded, and the cache after the load."""
        order: dict[tuple[str, ...], tuple[DeviceState, DeviceState]] = {
            ("weights",): (DeviceState.ASLEEP, DeviceState.EMPTY),
            ("kv_cache",): (DeviceState.LOADED, DeviceState.READY),
        }
        before, after = order[tuple(tags)]
        self._demand(f"wake {tags[0]}", before)
        await super().wake(tags)
        self.state = after

    async def health(self) -> dict[str, Any]:
        return {**await super().health(), "state": self.state.value}

    def _demand(self, what: str, *states: DeviceState) -> None:
        if self.state not in states:
            raise EngineError(f"{self} is {self.state.value}, so it cannot {what}.")
