"""Prompts that can still teach: those that are always solved, or never, are drawn in fewer epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Share, fits, refusal
from rl4llm.data.prompts import PromptStream
from rl4llm.runtime.seeds import derive_seed


class PromptCurriculum(PromptStream):
    """Pass over a prompt in some epochs, by the success rate p of its latest group.

    It is drawn in the share ``max(least, 4 p (1 - p))`` of the epochs: a reward of 0 or 1 varies most within a group at
    50 %, and not at all at 0 and 100 %. A prompt without a result is drawn in every epoch. Which epochs count depends on
    (seed, epoch, row) alone. A solved prompt comes again after about 1 / `least` epochs, and its new group then decides.
    A draw passes over fewer than 1 / `least` places on average, whatever the size of the dataset.

    >>> stream = PromptCurriculum(4, 2, name_of=str, least=0.01, shuffle=False)
    >>> stream.observe({"0": (8, 8), "1": (0, 8), "2": (4, 8)})  # solved, hopeless, half solved
    >>> stream.next_batch(), stream.next_batch(), stream.next_batch()
    ([2, 3], [2, 3], [2, 3])

    Args:
        name_of: the `prompt_id` of a row.
        least: the least share of the epochs in which a prompt is drawn, above 0 and at most 1.
    """

    watched: ClassVar[str] = "prompt_id"

    def __init__(
        self, num_rows: int, batch_size: int, *, name_of: Callable[[int], str], least: float, **order: Any
    ):
        if not fits(least, Share):
            raise ConfigError(refusal("curriculum", least, Share))
        super().__init__(num_rows, batch_size, **order)
        self._name_of = name_of
        self._least = least
        self._success: dict[str, float] = {}  # of the latest group, by prompt_id
        self._skipped = 0.0

    def observe(self, played: Mapping[str, tuple[int, int]]) -> None:
        """Take (successes, episodes) of each prompt, counted over all ranks; every rank must pass the same numbers."""
        self._success |= {name: succeeded / episodes for name, (succeeded, episodes) in played.items()}

    def metrics(self) -> dict[str, float]:
        """Return the share of the places that the last batch passed over."""
        return {"curriculum/skipped": self._skipped}

    def next_batch(self, total: int | None = None) -> list[int]:
        total = self.batch_size * self.world_size if total is None else total
        start, end = (total * rank // self.world_size for rank in (self.rank, self.rank + 1))
        before = self._consumed
        rows = [self._next() for _ in range(total)]
        self._skipped = 1 - total / (self._consumed - before) if total else 0.0
        self.earlier = Counter(rows[:start])
        return rows[start:end]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "success": dict(self._success)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._success = dict(state.get("success", {}))

    def _next(self) -> int:
        while True:
            row, epoch = self._row(self._consumed), self._consumed // self.num_rows
            self._consumed += 1
            rate = self._success.get(self._name_of(row), 0.5)
            share = max(self._least, 4 * rate * (1 - rate))
            if share >= 1 or derive_seed(self.seed, "curriculum", epoch, row) < share * 2**63:
                return row
