"""Several environments in one rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rl4llm.envs.rollout import Rollout, RolloutResult, play_together


class MixedRollout:
    """Plays the episodes of several environments at once, each with its own rewards, tools and sampling.

    A row is a number in all datasets, one behind the other. What fails in one environment is counted under its name.

    Args:
        parts: the rollouts of the environments, each with the name of its `part`.
    """

    def __init__(self, parts: Sequence[Rollout]):
        self.parts = list(parts)
        self._ends = list(accumulate(part.num_rows for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Of all datasets together."""
        return self._ends[-1]

    @property
    def group_size(self) -> int:
        """Attempts per prompt."""
        return self.parts[0].group_size

    @property
    def tokenizer(self) -> Any:
        """The policy's."""
        return self.parts[0].tokenizer

    def count_groups(self, rows: Sequence[int]) -> int:
        """How many groups the episodes of `rows` make from which the policy learns."""
        return sum(part.count_groups(own) for part, own in zip(self.parts, self._by_part(rows), strict=True))

    def play(self, rows: Sequence[int], *, earlier: Mapping[int, int] | None = None, **how: Any) -> RolloutResult:
        """Play and score episodes of some rows; how many, and which, see `Rollout.begin`."""
        counts = [Counter(own) for own in self._by_part(list(Counter(earlier or {}).elements()))]
        begun = zip(self.parts, self._by_part(rows), counts, strict=True)
        return play_together([part.begin(own, earlier=before, **how) for part, own, before in begun])

    def close(self) -> None:
        """Release the environments."""
        for part in self.parts:
            part.close()

    def _by_part(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows, as their own dataset numbers them."""
        starts = [0, *self._ends[:-1]]
        return [
            [row - start for row in rows if start <= row < end] for start, end in zip(starts, self._ends, strict=True)
        ]
