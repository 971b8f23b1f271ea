"""One process group for all servers that load the same weights, so that the trainer sends each tensor once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rl4llm.core.errors import EngineError
from rl4llm.core.types import WeightRef
from rl4llm.extensions.servers.clients.broadcast import Broadcast
from rl4llm.extensions.servers.clients.neighbour import check_same_nccl
from rl4llm.extensions.servers.clients.sglang_tensors import buckets
from rl4llm.runtime.threads import in_own_thread

logger = logging.getLogger(__name__)

LEAVE_S = 5.0  # for a server to leave an unused process group


class Receiver(Protocol):
    """A client whose server takes weights from a process group."""

    base_url: str
    trainer_host: str
    keep_cache: bool

    async def admin(self, path: str, body: Any, deadline_s: float | None = None) -> Any: ...
    async def ranks(self) -> int: ...
    async def transport(self) -> str: ...
    def update(self) -> AbstractAsyncContextManager[None]: ...


class Together:
    """The servers of a fleet that load weights at the same time.

    with together.expecting(clients, weight_ref):    # each of them calls `send`, or `gone` if it fails before
        ...

    The tensors are sent when every expected server waits for them. If that fails, and for a server that nobody expects, each
    server has its own group. A server that refuses to join ends the wait of the others. A group is kept for the next version
    if the servers are the same.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[Receiver, ...], Broadcast] = {}
        self._missing: set[Any] = set()
        self._waiting: dict[Receiver, asyncio.Future[None]] = {}
        self._weight_ref: WeightRef | None = None
        self._sending: asyncio.Task[None] | None = None

    @contextmanager
    def expecting(self, clients: Sequence[Any], weight_ref: WeightRef) -> Iterator[None]:
        """Have `send` wait for these clients, if they are several."""
        self._missing, self._weight_ref = set(clients if len(clients) > 1 else ()), weight_ref
        try:
            yield
        finally:
            self._missing.clear()

    def gone(self, client: Any) -> None:
        """Wait for this client no longer."""
        self._missing.discard(client)
        self._begin()

    async def send(self, client: Receiver, weight_ref: WeightRef) -> None:
        """Send the weights to a client's server, together with the other expected ones."""
        if client in self._missing and weight_ref is self._weight_ref:
            waiting = self._waiting[client] = asyncio.get_running_loop().create_future()
            self.gone(client)
            try:
                await waiting
            except asyncio.CancelledError:
                self._waiting.pop(client, None)
                if self._sending is not None:
                    self._sending.cancel()
                raise
            except _ApartError:
                await self._send((client,), weight_ref)
        else:
            await self._send((client,), weight_ref)

    async def leave(self, client: Receiver | None = None) -> None:
        """Leave all groups, or those of a client's server, at both ends."""
        for clients in [key for key in self.groups if client is None or client in key]:
            await self._leave(clients)

    def _begin(self) -> None:
        if self._missing or not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        assert self._weight_ref is not None  # set by `expecting`
        self._sending = asyncio.create_task(self._send(tuple(waiting), self._weight_ref))
        self._sending.add_done_callback(partial(_settle, list(waiting.values())))

    async def _send(self, clients: tuple[Receiver, ...], weight_ref: WeightRef) -> None:
        clients = tuple(sorted(clients, key=lambda client: client.base_url))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._leave, clients)
            group = self.groups.get(clients) or await self._join(clients)
            async with AsyncExitStack() as updates:
                for client in clients:
                    await updates.enter_async_context(client.update())
                for names, tensors, version in buckets(weight_ref):
                    body = _described(names, tensors, version, group)
                    body["flush_cache"] = not clients[0].keep_cache
                    whole = [tensor.detach().contiguous() for tensor in tensors]
                    taking = [client.admin("/update_weights_from_distributed", body) for client in clients]
                    await _meet(taking, partial(group.send, whole))
            undo.pop_all()

    async def _join(self, clients: tuple[Receiver, ...]) -> Broadcast:
        """Make a group of the trainer, with rank 0, and all ranks of these servers."""
        for client in clients:
            await self.leave(client)
        transport = await clients[0].transport()
        if transport == "nccl":
            for client in clients:
                check_same_nccl(client.base_url)
        ranks = [await client.ranks() for client in clients]
        host, name = clients[0].trainer_host, f"rl4llm-{secrets.token_hex(6)}"
        group = self.groups[clients] = Broadcast(host, 1 + sum(ranks), name, transport)
        bodies = [
            {
                "master_address": group.host,
                "master_port": group.port,
                "rank_offset": 1 + sum(ranks[:number]),
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.backend,
            }
            for number in range(len(clients))
        ]
        joining = [
            client.admin("/init_weights_update_group", body)
            for client, body in zip(clients, bodies, strict=True)
        ]
        await _meet(joining, group.connect)
        return group

    async def _leave(self, clients: tuple[Receiver, ...]) -> None:
        group = self.groups.pop(clients, None)
        if group is None:
            return
        with suppress(TimeoutError):  # gloo waits for what is under way, which may wait for a server
            async with asyncio.timeout(LEAVE_S):
                await in_own_thread("rl4llm-leave", group.close)
        body = {"group_name": group.name}
        requests = (client.admin("/destroy_weights_update_group", body, LEAVE_S) for client in clients)
        with suppress(EngineError):
            await asyncio.gather(*requests, return_exceptions=True)


class _ApartError(Exception):
    """Not an error of this server: sending to all together failed, so each is tried alone."""


def _described(
    names: Sequence[str], tensors: Sequence[Tensor], version: str | None, group: Broadcast
) -> dict[str, Any]:
    return {
        "names": names,
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "group_name": group.name,
        "weight_version": version,
    }


def _settle(waiting: Sequence[asyncio.Future[None]], sending: asyncio.Task[None]) -> None:
    """Give those who wait the result of sending to all of them."""
    problem = None if sending.cancelled() else sending.exception()
    failed = sending.cancelled() or problem is not None
    if problem is not None:
        logger.warning("One process group for all servers failed, so each gets its own: %s", problem)
    for future in waiting:
        if not future.done():
            if failed:
                future.set_exception(_ApartError())
            else:
                future.set_result(None)


async def _meet(theirs: Sequence[Coroutine[Any, Any, Any]], ours: Callable[[], None]) -> None:
    """Run the servers' part and this process's part together; if one fails, cancel the others."""
    tasks = [asyncio.create_task(request) for request in theirs]
    try:
        await asyncio.gather(*tasks, in_own_thread("rl4llm-broadcast", ours))
    finally:
        for task in tasks:
            task.cancel()
