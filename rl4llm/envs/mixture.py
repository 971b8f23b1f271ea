"""Play several environments in one rollout (environment mixture)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rl4llm.envs.rollout import Episodes, Rollout, RolloutResult, check_failures, play_together


class MixedRollout:
    """Play the episodes of several environments at once, each with its own rewards, tools and sampling.

    The rows of all datasets are numbered consecutively. Failures are counted under the name of their environment.

    Args:
        parts: the rollouts of the environments; `part` is the name of each.
    """

    def __init__(self, parts: Sequence[Rollout]):
        self.parts = list(parts)
        self._ends = list(accumulate(part.num_rows for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all datasets together."""
        return self._ends[-1]

    @property
    def group_size(self) -> int:
        """Return the number of samples per prompt."""
        return self.parts[0].group_size

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self.parts[0].tokenizer

    @property
    def plays_whole(self) -> bool:
        """Return whether an environment plays its episodes together, in an interaction loop of a user."""
        return any(part.plays_whole for part in self.parts)

    def count_groups(self, rows: Sequence[int]) -> int:
        """Return the number of groups that the policy learns from in the episodes of `rows`."""
        return sum(
            part.count_groups(share) for part, share in zip(self.parts, self._by_part(rows), strict=True)
        )

    def play(self, rows: Sequence[int], **how: Any) -> RolloutResult:
        """Play and score episodes of some rows; `Rollout.begin` explains the arguments."""
        units = self.begin(rows, **how)
        self.parts[0].run(play_together(units))
        return self.finish(units)

    def begin(
        self, rows: Sequence[int], *, earlier: Mapping[int, int] | None = None, **how: Any
    ) -> list[Episodes]:
        """Return new episodes of some rows, in the order of the rows."""
        counts = [Counter(share) for share in self._by_part(list(Counter(earlier or {}).elements()))]
        shares = zip(self.parts, self._by_part(rows), counts, strict=True)
        begun = [iter(part.begin(share, earlier=before, **how)) for part, share, before in shares]
        units = (next(begun[bisect_right(self._ends, row)], None) for row in rows)
        return [unit for unit in units if unit is not None]

    def finish(self, played: Sequence[Episodes]) -> RolloutResult:
        """Score played episodes, ordered by part; raise TooManyFailuresError if too many of them failed."""
        results = [part.scored([unit for unit in played if unit.rollout is part]) for part in self.parts]
        episodes = [episode for unit in played for episode in unit.all]
        check_failures(episodes, max(part.max_failed_share for part in self.parts))
        return RolloutResult(
            groups=tuple(group for result in results for group in result.groups),
            failed=tuple(sample for result in results for sample in result.failed),
        )

    def close(self) -> None:
        """Release the environments."""
        for part in self.parts:
            part.close()

    def _by_part(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each part, as its dataset numbers them."""
        starts = [0, *self._ends[:-1]]
        return [
            [row - start for row in rows if start <= row < end]
            for start, end in zip(starts, self._ends, strict=True)
        ]
