"""Draw prompts from an endless stream over a dataset that ranks share and that resumes at any point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rl4llm.core.errors import CheckpointError
from rl4llm.runtime.seeds import derive_seed


class PromptStream:
    """Yield row indices of one rank's next prompts.

    All ranks follow one endless sequence of epochs, each in an order that depends on (seed, epoch) alone. A batch takes
    `batch_size` places per rank, so batches cross the end of an epoch and no row is dropped. The only state is the number
    of places that all ranks together have consumed. So the sequence does not depend on the number of ranks, and a run that
    resumes with other ranks or batches neither skips nor repeats a prompt.

    A batch across the end of an epoch may contain a row twice, and so may a batch with more prompts than rows.

    >>> stream = PromptStream(num_rows=4, batch_size=3, shuffle=False)
    >>> stream.next_batch(), stream.next_batch()
    ([0, 1, 2], [3, 0, 1])
    """

    watched: ClassVar[str] = ""  # the field of a trajectory that names whose success changes the next prompts

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
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.earlier: Counter[int] = Counter()  # rows of the last batch on lower ranks
        self._consumed = 0
        self._orders: dict[int, np.ndarray] = {}

    def observe(self, played: Mapping[str, tuple[int, int]]) -> None:
        """Ignore the successes: here the next prompts do not depend on them."""

    def metrics(self) -> dict[str, float]:
        """Return what decided about the next prompts, for the log; here nothing."""
        return {}

    def next_batch(self, total: int | None = None) -> list[int]:
        """Return the rows of this rank's next prompts: its share of `total`, equal on all ranks, or `batch_size` rows."""
        total = self.batch_size * self.world_size if total is None else total
        start, end = (self._consumed + total * rank // self.world_size for rank in (self.rank, self.rank + 1))
        self.earlier = Counter(self._row(place) for place in range(self._consumed, start))
        self._consumed += total
        return [self._row(place) for place in range(start, end)]

    @property
    def epoch(self) -> float:
        """Return the number of passes over the dataset so far, over all ranks."""
        return self._consumed / self.num_rows

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values that are the same on every rank."""
        return {"consumed": self._consumed, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; raises CheckpointError if it belongs to another sequence of prompts."""
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise CheckpointError(
                    f"The prompts of this run have {name}={value}, those of the checkpoint {name}={state.get(name)!r}. "
                    "Next step: restore the option or dataset, or start a new run."
                )
        self._consumed = state["consumed"]

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _row(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_rows)
        if not self.shuffle:
            return offset
        if epoch not in self._orders:
            self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
            # Raw bits and a stable sort: numpy promises the same bits in every release, not the same permutations.
            bits = np.random.Philox(key=derive_seed(self.seed, "prompts", epoch)).random_raw(self.num_rows)
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return int(self._orders[epoch][offset])
