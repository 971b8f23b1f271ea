"""One process group for all servers that load the same weights, so that the trainer sends each tensor once.

It is NCCL between GPUs and gloo on CPUs, and exists beside the default group, which belongs to the trainer's ranks (or to
the server's). torch has no public call for that: `Broadcast` makes the same calls in the same order as servers do on their
side, so that both ends find each other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, Store, _new_process_group_helper, _world

from rl4llm.core.errors import EngineError
from rl4llm.core.weights import WeightRef
from rl4llm.runtime import devices
from rl4llm.runtime.threads import in_own_thread

if TYPE_CHECKING:
    from rl4llm.extensions.servers.clients.sglang import SGLangClient

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
LEAVE_S = 5.0  # for a server to leave an unused process group
TRAINER = 0
JOIN_S = 1.0  # for servers to connect to a group that is given up, so that its end reaches them


def buckets(weight_ref: WeightRef) -> Iterator[tuple[list[str], list[Tensor], str | None]]:
    """Yield names and tensors of at most BUCKET_BYTES together; only the last bucket has the version, complete by then."""
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    assert weight_ref.tensors is not None  # true for this kind
    for name, tensor in weight_ref.tensors():
        if tensors and size + tensor.nbytes > BUCKET_BYTES:
            yield names, tensors, None
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    yield names, tensors, str(weight_ref.version)


class Broadcast:
    """The trainer's end of a group with the `world_size - 1` ranks of all its servers.

    `connect` blocks until they join, so they must be asked to join at the same time. If one does not, `close` ends the wait
    of all others at once.
    """

    def __init__(self, host: str, world_size: int, name: str, backend: str, timeout_s: float = 120.0):
        with socket.socket() as probe:
            probe.bind((host, 0))  # which fails if `host` is not this machine
            self.host, self.port = host, int(probe.getsockname()[1])
        self.world_size, self.name, self.backend = world_size, name, backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        # All ranks, this one too, wait for each other as clients of one store: without it, each wait is an error.
        self._meeting: Store | None = self._store(is_master=True)

    def connect(self) -> None:
        # "tcp://" of torch would look for the store of torchrun's agent, which does not exist here.
        if self._meeting is None:
            raise ConnectionError(f"The process group {self.name} was left before it was complete.")
        store = self._store(is_master=False)
        options: dict[str, Any] = {"group_name": self.name, "timeout": self._timeout}
        group, _ = _new_process_group_helper(
            self.world_size, TRAINER, [], Backend(self.backend), PrefixStore(self.name, store), **options
        )
        _world.pg_group_ranks[group] = {i: i for i in range(self.world_size)}
        self._group = group

    def _store(self, *, is_master: bool) -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined] # not exported
            self.host, self.port, self.world_size, is_master, self._timeout, wait_for_workers=False
        )

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors in order, and wait until all are sent."""
        assert self._group is not None  # `connect` was called before
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = TRAINER, 0
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self.backend == "nccl":
            device = tensors[0].device
            devices.call(device, "synchronize", device)  # the current device of this thread is another

    def close(self) -> None:
        """Leave the group; one that is not complete is given up, by all who wait for it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        elif self._meeting is not None:
            time.sleep(JOIN_S)
        self._meeting = None


class Together:
    """The servers of a fleet that load weights at the same time.

    with together.expecting(clients, weight_ref):    # each of them calls `send`, or `gone` if it fails before
        ...

    The tensors are sent when every expected server waits for them. If that fails, and for a server that nobody expects, each
    server has its own group. A server that refuses to join ends the wait of the others. A group is kept for the next version
    if the servers are the same.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[SGLangClient, ...], Broadcast] = {}
        self._missing: set[Any] = set()
        self._waiting: dict[SGLangClient, asyncio.Future[None]] = {}
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

    async def send(self, client: SGLangClient, weight_ref: WeightRef) -> None:
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

    async def leave(self, client: SGLangClient | None = None) -> None:
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

    async def _send(self, clients: tuple[SGLangClient, ...], weight_ref: WeightRef) -> None:
        clients = tuple(sorted(clients, key=lambda client: client.base_url))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._leave, clients)
            group = self.groups.get(clients) or await self._join(clients)
            async with AsyncExitStack() as updates:
                for client in clients:
                    await updates.enter_async_context(client.update())
                for names, tensors, version in buckets(weight_ref):
                    body = {
                        "names": names,
                        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
                        "shapes": [list(tensor.shape) for tensor in tensors],
                        "group_name": group.name,
                        "weight_version": version,
                        "flush_cache": not clients[0].keep_cache,
                    }
                    whole = [tensor.detach().contiguous() for tensor in tensors]
                    taking = [client.admin("/update_weights_from_distributed", body) for client in clients]
                    await _meet(taking, partial(group.send, whole))
            undo.pop_all()

    async def _join(self, clients: tuple[SGLangClient, ...]) -> Broadcast:
        """Make a group of the trainer, with rank 0, and all ranks of these servers."""
        for client in clients:
            await self.leave(client)
        transport = await clients[0].transport()
        ranks = [await client.ranks() for client in clients]
        host, name = clients[0].trainer_host, f"rl4llm-{secrets.token_hex(6)}"
        group = self.groups[clients] = Broadcast(host, 1 + sum(ranks), name, transport)
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        firsts = accumulate(ranks, initial=1)
        joining = [
            client.admin("/init_weights_update_group", {**body, "rank_offset": rank})
            for client, rank in zip(clients, firsts, strict=False)
        ]
        await _meet(joining, group.connect)
        return group

    async def _leave(self, clients: tuple[SGLangClient, ...]) -> None:
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
