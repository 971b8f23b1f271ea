"""Which prompts come next: an endless stream over a dataset, shared out over ranks, resumable at any point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.core.seeds import derive_seed


class PromptStream:
    """Row indices of one rank's next prompts.

    All ranks walk one endless sequence: epoch after epoch, each in an order that depends on (seed, epoch) alone. A batch
    takes `batch_size` places per rank from it, so batches run over the end of an epoch and no row is dropped. The only
    state is how many places all ranks together have consumed: what is drawn does not depend on the number of ranks, and a
    run that resumes with other ranks or batches neither skips nor repeats a prompt.

    A batch over the end of an epoch can hold a row twice, as can any batch of more prompts than there are rows.

    >>> stream = PromptStream(num_rows=4, batch_size=3, shuffle=False)
    >>> stream.next_batch(), stream.next_batch()
    ([0, 1, 2], [3, 0, 1])
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle: bool = True,
    ):
        for name, value in {"num_rows": num_rows, "batch_size": batch_size, "world_size": world_size}.items():
            if value < 1:
                raise ConfigError(f"PromptStream: {name}={value} is not accepted: at least 1.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"PromptStream: rank={rank} is not accepted: 0 to {world_size - 1}.")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.watched: tuple[str, ...] = ()  # what decides about the next prompts, beside their order: nothing
        self.earlier: Counter[int] = Counter()  # rows of the last batch that ranks before this one got
        self._consumed = 0
        self._orders: dict[int, np.ndarray] = {}

    def observe(self, played: Mapping[str, tuple[int, int]]) -> None:
        """How many episodes of each watched part succeeded, of how many; here nothing depends on it."""

    def metrics(self) -> dict[str, float]:
        """What decided about the next prompts."""
        return {}

    def next_batch(self, total: int | None = None) -> list[int]:
        """The rows of this rank's next prompts: its share of `total`, which every rank must say, or `batch_size`."""
        total = self.batch_size * self.world_size if total is None else total
        start, end = (self._consumed + total * rank // self.world_size for rank in (self.rank, self.rank + 1))
        self.earlier = Counter(self._row(place) for place in range(self._consumed, start))
        self._consumed += total
        return [self._row(place) for place in range(start, end)]

    @property
    def epoch(self) -> float:
        """How many times the dataset has been gone through, over all ranks."""
        return self._consumed / self.num_rows

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON, and the same on every rank."""
        return {"consumed": self._consumed, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; raises CheckpointError when it belongs to another sequence of prompts."""
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise CheckpointError(
                    f"The prompts of this run have {name}={value}, those of the checkpoint {name}={state.get(name)!r}; "
                    "going on would skip and repeat prompts. Next step: restore the option or dataset, or begin a new run."
                )
        consumed = state.get("consumed")
        if isinstance(consumed, bool) or not isinstance(consumed, int) or consumed < 0:
            raise CheckpointError(f"The checkpoint's prompt cursor is damaged: consumed={consumed!r}; a count is expected.")
        self._consumed = consumed

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _row(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_rows)
        return int(self._order(epoch)[offset]) if self.shuffle else offset

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            # Raw bits and a stable sort: numpy promises the same bits in every release, not the same permutations.
            bits = np.random.Philox(key=derive_seed(self.seed, "prompts", epoch)).random_raw(self.num_rows)
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return self._orders[epoch]
