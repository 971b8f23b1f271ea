"""Environment mixture and pools of a dataset: draw prompts in proportion to weights, which may follow the success rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.core.sample import pool_of
from rl4llm.core.schema import Positive, Share, fits, refusal
from rl4llm.data.prompts import PromptStream

RATE = 0.2  # weight of a step in the running mean of the success rate
MAX_POOLS = 64  # each has a row of metrics


class MixedPrompts:
    """Yield row indices of one rank's next prompts; the rows of all parts are numbered consecutively.

    All ranks follow one endless sequence, as in `PromptStream`. Each place goes to the part that is furthest behind its
    share of the weights. After any number of places each part has had its share to within one prompt, on any number of
    ranks. Within a part its own stream decides.

    >>> streams = {"a": PromptStream(2, 1, shuffle=False), "b": PromptStream(9, 1, shuffle=False)}
    >>> MixedPrompts(streams, {"a": 1, "b": 2}, batch_size=6).next_batch()
    [2, 0, 3, 4, 1, 5]

    With a `curriculum` the weight of a part is multiplied by ``max(curriculum, 4 p (1 - p))``, where p is its success rate:
    a reward of 0 or 1 varies most within a group at 50 %. p is a running mean, and each step replaces 20 % of it. A
    part that was not played yet counts in full. The state is the same on all ranks. With `rows`, the parts are pools of one
    dataset, such as its levels of difficulty.

    Args:
        streams: the stream of each part, made for a single rank.
        weights: the weight of each part, above 0; only their ratios count.
        batch_size: prompts of a batch on this rank.
        curriculum: the least share of its weight that a part keeps, above 0 and at most 1; None keeps weights constant.
        rows: the rows of each pool; None numbers the rows of all parts consecutively.
    """

    def __init__(
        self,
        streams: Mapping[str, PromptStream],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        curriculum: float | None = None,
        rows: Mapping[str, Sequence[int]] | None = None,
    ):
        for name, weight in weights.items():
            if not fits(weight, Positive):
                raise ConfigError(refusal(f"parts.{name}.weight", weight, Positive))
        if not fits(curriculum, Share | None):
            raise ConfigError(refusal("curriculum", curriculum, Share | None))
        self.streams = dict(streams)
        self.weights = {name: float(weights[name]) for name in self.streams}
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.curriculum = curriculum
        self.earlier: Counter[int] = Counter()  # rows of the last batch on lower ranks
        ends = accumulate(stream.num_rows for stream in self.streams.values())
        numbered = zip(self.streams.items(), ends, strict=True)
        self._rows = rows or {name: range(end - stream.num_rows, end) for (name, stream), end in numbered}
        self._behind = dict.fromkeys(self.streams, 0.0)  # by how many prompts each part is behind its share
        self._success: dict[str, float] = {}

    @property
    def watched(self) -> str:
        """Return the field of a trajectory that names the part whose success `observe` needs; "" needs none."""
        return "" if self.curriculum is None else "part"

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the next prompts that each part gets; shares add up to 1."""
        counted = dict(self.weights)
        if self.curriculum is not None:
            for name, rate in self._success.items():
                counted[name] *= max(self.curriculum, 4 * rate * (1 - rate))
        total = math.fsum(counted.values())
        return {name: weight / total for name, weight in counted.items()}

    def next_batch(self, total: int | None = None) -> list[int]:
        """Return the rows of this rank's next prompts: its share of `total`, equal on all ranks, or `batch_size` rows."""
        total = self.batch_size * self.world_size if total is None else total
        start, end = (total * rank // self.world_size for rank in (self.rank, self.rank + 1))
        shares = self.shares
        rows = []
        for _ in range(total):
            for name, share in shares.items():
                self._behind[name] += share
            chosen = max(self._behind, key=self._behind.__getitem__)  # of equals the first
            self._behind[chosen] -= 1.0
            rows.append(self._rows[chosen][self.streams[chosen].next_batch()[0]])
        self.earlier = Counter(rows[:start])
        return rows[start:end]

    def observe(self, played: Mapping[str, tuple[int, int]]) -> None:
        """Take (successes, episodes) of each part, counted over all ranks; every rank must pass the same numbers."""
        for name, (succeeded, episodes) in played.items():
            if episodes:
                rate = succeeded / episodes
                before = self._success.get(name, rate)
                self._success[name] = before + RATE * (rate - before)

    def metrics(self) -> dict[str, float]:
        """Return the current shares and success rates."""
        shares = {f"part/{name}/weight": share for name, share in self.shares.items()}
        return {**shares, **{f"part/{name}/success": rate for name, rate in self._success.items()}}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values that are the same on every rank."""
        streams = {name: stream.state() for name, stream in self.streams.items()}
        return {"parts": streams, "behind": dict(self._behind), "success": dict(self._success)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; raises CheckpointError if it belongs to other parts."""
        stored = state.get("parts", {})
        if set(stored) != set(self.streams):
            raise CheckpointError(
                f"The parts of this run are {', '.join(self.streams)}, those of the checkpoint {', '.join(stored)}. Next "
                "step: restore the configuration, or start a new run."
            )
        for name, stream in self.streams.items():
            try:
                stream.restore(stored[name])
            except CheckpointError as error:
                raise CheckpointError(f"parts.{name}: {error}") from None
        self._behind = {name: state["behind"][name] for name in self.streams}
        self._success = dict(state["success"])


def pools(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, list[int]]:
    """Return the rows of each pool, which the values of a column name; pools are ordered by name.

    >>> pools([{"level": 2}, {"level": 1}, {"level": 2}], "level")
    {'1': [1], '2': [0, 2]}
    """
    numbers: dict[str, list[int]] = {}
    for number in range(len(rows)):
        numbers.setdefault(pool_of(rows[number], column), []).append(number)
    if "" in numbers or len(numbers) > MAX_POOLS:
        reason = "some rows have no value there" if "" in numbers else f"it has {len(numbers)} values"
        raise ConfigError(
            f"curriculum={column!r}: {reason}. Name a column of all rows with at most {MAX_POOLS} values."
        )
    return dict(sorted(numbers.items()))
