"""A process group of the trainer and servers, to broadcast weights: NCCL between GPUs, gloo on CPUs.

The group exists beside the default one, which belongs to the trainer's ranks (or to the server's). torch has no public call
for that. This is the same sequence of calls that servers use on their side, so that both ends find each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, Store, _new_process_group_helper, _world

TRAINER = 0
JOIN_S = 1.0  # for servers to connect to a group that is given up, so that its end reaches them


class Broadcast:
    """The trainer's end of a group with the `world_size - 1` ranks of all its servers.

    `connect` blocks until they join, so they must be asked to join at the same time. If one does not, `close` ends the wait
    of all others at once.
    """

    def __init__(self, host: str, world_size: int, name: str, backend: str, timeout_s: float = 120.0):
        self.host, self.port = host, _port_of(host)
        self.world_size, self.name, self.backend = world_size, name, backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        # All ranks, this one too, wait for each other as clients of one store: without it, each wait is an error.
        self._meeting: Store | None = self._store(is_master=True)

    def connect(self) -> None:
        """Connect to the servers' ranks."""
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
            torch.cuda.synchronize(tensors[0].device)  # the current device of this thread is another

    def close(self) -> None:
        """Leave the group; one that is not complete is given up, by all who wait for it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        elif self._meeting is not None:
            time.sleep(JOIN_S)
        self._meeting = None


def _port_of(host: str) -> int:
    """Return a free port; raise OSError if `host` is not this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
