"""What a vLLM server's workers report about their weights, and readings of it that many requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rl4llm.core.errors import UnreachableError
from rl4llm.extensions.servers.clients.server import NEVER_LOADED, field


@dataclass(frozen=True, slots=True)
class HeldVersions:
    """What the server's workers report about their weights; `ids` change with every load and every restart.

    `replaced` are the ids before the last load.
    """

    version: int
    ids: tuple[str, ...]
    replaced: tuple[str, ...]
    logprobs_mode: str
    adapters_leak: bool
    can_sleep: bool
    asleep: frozenset[str] = frozenset()


class FreshReads:
    """Shares one reading among many callers, but never one that began before they called."""

    def __init__(self, read: Callable[[], Awaitable[HeldVersions]]):
        self._read = read
        self._running: asyncio.Task[HeldVersions] | None = None
        self._next: asyncio.Task[HeldVersions] | None = None

    async def get(self) -> HeldVersions:
        """Return the result of a reading that begins after this call."""
        if self._next is None or self._next.done():
            self._next = asyncio.ensure_future(self._after(self._running))
            # its callers may have been cancelled, and asyncio would log an error that nobody took
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Task[HeldVersions] | None) -> HeldVersions:
        if running is not None and not running.done():
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await self._read()


def held_by(answer: Any) -> HeldVersions:
    """Combine the workers' reports: the version is valid only if all of them hold it."""
    workers = field(answer, "results", "/collective_rpc")
    versions = [field(worker, "version", "/collective_rpc") for worker in workers or ()]
    if not versions or not all(isinstance(version, int) for version in versions):
        raise UnreachableError(f"A vLLM server's workers report versions {versions!r}.")
    ids = tuple(str(field(worker, "id", "/collective_rpc")) for worker in workers)
    replaced = tuple(str(worker.get("replaced")) for worker in workers)
    mode = str(field(workers[0], "logprobs_mode", "/collective_rpc"))
    leak = any(worker.get("adapters_leak") for worker in workers)
    can_sleep = all(worker.get("can_sleep", True) for worker in workers)
    asleep = frozenset(tag for worker in workers for tag in str(worker.get("asleep", "")).split(",") if tag)
    return HeldVersions(
        versions[0] if len(set(versions)) == 1 else NEVER_LOADED, ids, replaced, mode, leak, can_sleep, asleep
    )
