"""Which environment is played next, where several are: in proportion to weights, which may follow the rate of success."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.data.prompts import PromptStream

RATE = 0.2  # of how far a step moves the rate of success that is remembered


class MixedPrompts:
    """Row indices of one rank's next prompts, from the datasets of several parts, numbered one behind the other.

    All ranks walk one endless sequence, as in `PromptStream`: each place goes to the part that is furthest behind its share
    of the weights, so after any number of places each part has had its share of them to within one prompt, whatever the
    number of ranks. Within a part its own stream decides.

    >>> streams = {"a": PromptStream(2, 1, shuffle=False), "b": PromptStream(9, 1, shuffle=False)}
    >>> MixedPrompts(streams, {"a": 1, "b": 2}, batch_size=6).next_batch()
    [2, 0, 3, 4, 1, 5]

    With a `curriculum` the weight of a part counts ``max(curriculum, 4 p (1 - p))`` times, where p is its rate of success:
    the spread of a reward of 0 or 1, from which groups learn, is greatest at 50 %. p is remembered as a running mean, of
    which each step replaces 20 %; a part that was not played yet counts in full. The state is the same on all ranks.

    Args:
        streams: of one rank each, by part.
        weights: above 0, by part; only their ratios count.
        batch_size: prompts of a batch on this rank.
        curriculum: the least share of its weight that a part keeps, above 0 and at most 1; None for weights that stay.
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
    ):
        for name, weight in weights.items():
            if not is_weight(weight):
                raise ConfigError(f"parts.{name}.weight={weight!r} is not accepted: a number above 0.")
        if curriculum is not None and not (is_weight(curriculum) and curriculum <= 1):
            raise ConfigError(f"curriculum={curriculum!r} is not accepted: above 0 and at most 1, or null for none.")
        self.streams = dict(streams)
        self.weights = {name: float(weights[name]) for name in self.streams}
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.curriculum = curriculum
        self.earlier: Counter[int] = Counter()  # rows of the last batch that ranks before this one got
        sizes = [stream.num_rows for stream in self.streams.values()]
        self._starts = dict(zip(self.streams, accumulate([0, *sizes]), strict=False))
        self._behind = dict.fromkeys(self.streams, 0.0)  # by how many prompts each part is behind its share
        self._success: dict[str, float] = {}

    @property
    def watched(self) -> tuple[str, ...]:
        """The parts whose success `observe` wants to be told."""
        return () if self.curriculum is None else tuple(self.streams)

    @property
    def shares(self) -> dict[str, float]:
        """How much of the next prompts each part gets; they add up to 1."""
        counted = {name: weight * self._factor(name) for name, weight in self.weights.items()}
        total = math.fsum(counted.values())
        return {name: weight / total for name, weight in counted.items()}

    def next_batch(self, total: int | None = None) -> list[int]:
        """The rows of this rank's next prompts: its share of `total`, which every rank must say, or `batch_size`."""
        total = self.batch_size * self.world_size if total is None else total
        start, end = (total * rank // self.world_size for rank in (self.rank, self.rank + 1))
        shares = self.shares
        rows = [self._next_row(shares) for _ in range(total)]
        self.earlier = Counter(rows[:start])
        return rows[start:end]

    def observe(self, played: Mapping[str, tuple[int, int]]) -> None:
        """How many episodes of each part succeeded, of how many on all ranks; every rank must say the same."""
        for name, (succeeded, episodes) in played.items():
            if episodes:
                rate = succeeded / episodes
                self._success[name] = self._success.get(name, rate) + RATE * (rate - self._success.get(name, rate))

    def metrics(self) -> dict[str, float]:
        """The shares as they are now, and the rates of success behind them."""
        shares = {f"part/{name}/weight": share for name, share in self.shares.items()}
        return {**shares, **{f"part/{name}/success": rate for name, rate in self._success.items()}}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON, and the same on every rank."""
        streams = {name: stream.state() for name, stream in self.streams.items()}
        return {"parts": streams, "behind": dict(self._behind), "success": dict(self._success)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; raises CheckpointError when it belongs to other parts."""
        stored = state.get("parts")
        if not isinstance(stored, Mapping) or set(stored) != set(self.streams):
            found = ", ".join(stored) if isinstance(stored, Mapping) else "no parts"
            raise CheckpointError(
                f"The parts of this run are {', '.join(self.streams)}, the checkpoint has {found}. Next step: restore the "
                "configuration, or begin a new run."
            )
        for name, stream in self.streams.items():
            try:
                stream.restore(stored[name])
            except CheckpointError as error:
                raise CheckpointError(f"parts.{name}: {error}") from None
        self._behind = {name: _number(state.get("behind"), name) for name in self.streams}
        self._success = {name: _number(state["success"], name) for name in state.get("success", {})}

    def _next_row(self, shares: Mapping[str, float]) -> int:
        for name, share in shares.items():
            self._behind[name] += share
        chosen = max(self._behind, key=self._behind.__getitem__)  # of equals the first
        self._behind[chosen] -= 1.0
        return self._starts[chosen] + self.streams[chosen].next_batch()[0]

    def _factor(self, name: str) -> float:
        rate = self._success.get(name)
        return 1.0 if rate is None or self.curriculum is None else max(self.curriculum, 4 * rate * (1 - rate))


def is_weight(value: Any) -> bool:
    """Whether something is a finite number above 0."""
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value > 0


def _number(stored: Any, name: str) -> float:
    value = stored.get(name) if isinstance(stored, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"The checkpoint's state of the part {name!r} is damaged: {value!r}; a number is expected.")
    return float(value)
