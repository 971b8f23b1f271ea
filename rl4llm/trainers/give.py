"""How ranks that each hold a part of the weights hand them to the one that publishes.

Whoever publishes goes through the weights as often as it likes: once for files, once more for a way that failed, once for
each server. Ranks that hold a part have to take part every time, so they are told when it begins and when it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rl4llm.core.base_backend import BaseAdapter, BaseBackend
from rl4llm.core.ranks import Ranks

WEIGHTS, ADAPTER, OVER = "weights", "adapter", "over"


class Announced:
    """A backend or its adapter as publishers see it, on the first rank: whoever goes through its weights takes the other
    ranks along."""

    def __init__(self, holder: BaseBackend | BaseAdapter, ranks: Ranks, name: str = WEIGHTS):
        self._holder = holder
        self._ranks = ranks
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._holder, name)

    @property
    def adapter(self) -> Announced | None:
        """That of the backend."""
        adapter = self._holder.adapter if isinstance(self._holder, BaseBackend) else None
        return None if adapter is None else Announced(adapter, self._ranks, ADAPTER)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each weight. The others go to the end, so this does too, also when nobody wants the rest."""
        self._ranks.share(self._name)
        weights = self._holder.weights()
        try:
            for item in weights:  # noqa: UP028 - "yield from" would close what is drained below
                yield item
        finally:
            for _ in weights:
                pass


@contextmanager
def giving_weights(backend: BaseBackend, ranks: Ranks) -> Iterator[Any]:
    """On the first rank: inside, the backend's weights are those of all ranks together; whole ones are there at any time."""
    try:
        yield backend if backend.whole else Announced(backend, ranks)
    finally:
        ranks.share(OVER)


def give_weights(backend: BaseBackend, ranks: Ranks) -> None:
    """On every other rank: take part until the first one is done."""
    holders = {WEIGHTS: backend, ADAPTER: backend.adapter}
    while holder := holders.get(ranks.share(None)):
        for _ in holder.weights():
            pass
