"""What the trainer knew of each token that it learned from, for the record of episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl4llm.core.types import TokenSpan, TrainBatch

DIGITS = 6  # of nats; those of an fp32 log-prob that mean something


@dataclass(slots=True)
class SpanNote:
    """Of one span of the policy: the trainer's log-prob of each token (nats), its advantage, what each counts in the loss of
    the step, and the places in the span at which a clip cut the gradient."""

    logprobs: list[float]
    advantages: list[float]
    weight: float
    clipped: list[int]


class TrainedTokens:
    """Gathers the passes of one step, and sorts them by span when the step is over.

        trained.add(update.records, batch, logprobs_BT, clipped_BT)
        trained.by_span()[id(span)].advantages

    A token that trains several times keeps the numbers of its first pass; it is clipped if any pass clipped it.
    """

    def __init__(self) -> None:
        self._passes: list[tuple[Sequence[tuple[TokenSpan, ...]], TrainBatch, Tensor, Tensor, Tensor | None]] = []

    def add(
        self,
        records: Sequence[tuple[TokenSpan, ...]],
        batch: TrainBatch,
        logprobs_BT: Tensor,
        clipped_BT: Tensor | None = None,
    ) -> None:
        """Note a micro-batch; `clipped_BT` is 1 where a clip cut the gradient, None where nothing clips. No copy is made."""
        if batch.record_ids_BT is not None:
            clipped_BT = None if clipped_BT is None else clipped_BT.detach()
            self._passes.append((records, batch, batch.record_ids_BT, logprobs_BT.detach(), clipped_BT))

    def by_span(self) -> dict[int, SpanNote]:
        """The notes of all spans that trained, by the `id` of the span."""
        found: dict[int, SpanNote] = {}
        for passed in self._passes:
            for span, note in _notes(*passed):
                known = found.setdefault(id(span), note)
                known.clipped = sorted({*known.clipped, *note.clipped})
        return found


def _notes(
    records: Sequence[tuple[TokenSpan, ...]],
    batch: TrainBatch,
    record_ids_BT: Tensor,
    logprobs_BT: Tensor,
    clipped_BT: Tensor | None,
) -> Iterator[tuple[TokenSpan, SpanNote]]:
    mask_BT = _array(batch.mask_BT)
    record_ids = _array(record_ids_BT)[mask_BT]
    order = np.lexsort((_array(batch.position_ids_BT)[mask_BT], record_ids))

    def numbers(values_BT: Tensor) -> NDArray[Any]:
        return _array(values_BT.expand_as(batch.mask_BT))[mask_BT][order]

    logprobs, advantages = (
        np.round(numbers(values_BT).astype(np.float64), DIGITS) for values_BT in (logprobs_BT, batch.advantages_BT)
    )
    weights = numbers(batch.weights_BT)
    clipped = numbers(clipped_BT) > 0 if clipped_BT is not None else np.zeros(len(order), bool)
    end = 0
    for span in (span for i in np.unique(record_ids) for span in records[i] if span.author == "policy"):
        start, end = end, end + len(span.token_ids)
        places = slice(start, end)
        note = SpanNote(
            logprobs[places].tolist(),
            advantages[places].tolist(),
            float(weights[start]) if end > start else 0.0,
            np.flatnonzero(clipped[places]).tolist(),
        )
        yield span, note


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()
