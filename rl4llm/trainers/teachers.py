"""Several references, each for the tokens of its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from rl4llm.core.base_backend import TokenScorer
from rl4llm.core.types import TrainBatch


class Teachers:
    """The references by the names of environments in `Needs.references`; that of the name "" serves all others.

    Each sees only its own policy tokens of a batch, whose `environment_ids_BT` number the names, -1 for the others.
    """

    def __init__(self, references: Mapping[str, TokenScorer]):
        self.references = references

    @property
    def problem(self) -> str:
        return next(filter(None, (each.problem for each in self.references.values())), "")

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Return what `BaseBackend.forward` returns."""
        numbers = [each.forward(part, temperature=temperature) for each, part in self._parts(batch)]
        return sum(numbers[1:], numbers[0])

    def refer(self, batch: TrainBatch, top: int, *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Return what `BaseBackend.refer` returns for one token or more."""
        first, *rest = (each.refer(part, top, temperature=temperature) for each, part in self._parts(batch))
        return {name: sum((each[name] for each in rest), tensor) for name, tensor in first.items()}

    def _parts(self, batch: TrainBatch) -> Iterator[tuple[TokenScorer, TrainBatch]]:
        """Yield each reference and a batch that asks for its tokens alone; the numbers of all others are 0."""
        for number, (name, reference) in enumerate(self.references.items()):
            chosen_BT = batch.later["environment_ids_BT"] == (number if name else -1)
            yield reference, replace(batch, mask_BT=batch.mask_BT & chosen_BT)
