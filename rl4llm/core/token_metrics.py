"""From metrics of tokens to those of a micro-batch, and from these to the metrics of an optimizer step.

The name of a token metric says how it becomes one number:

- ``ratio/max``: the maximum over the policy's tokens;
- ``dpo/margin/weighted``: the sum with the weights of the loss, reported as ``dpo/margin``;
- every other: the mean over the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.types import TrainBatch
from rl4llm.runtime.ranks import Ranks

MAX, WEIGHTED = "/max", "/weighted"


def of_batch(loss: Tensor, metrics: TokenMetrics, batch: TrainBatch) -> dict[str, float]:
    """Return the "loss", the number of the policy's "tokens", and one number of each metric."""
    mask_BT = batch.mask_BT
    tokens = mask_BT.sum()
    values = [loss, tokens]
    for name, metric_BT in metrics.items():
        metric_BT = metric_BT.detach()
        if name.endswith(MAX):
            values.append(metric_BT.masked_fill(~mask_BT, float("-inf")).max())
        elif name.endswith(WEIGHTED):
            values.append((metric_BT * batch.weights_BT).sum())
        else:
            values.append(metric_BT.masked_fill(~mask_BT, 0.0).sum() / tokens.clamp(min=1))
    names = ["loss", "tokens", *metrics]
    return dict(zip(names, torch.stack([value.double() for value in values]).tolist(), strict=True))


def of_update(parts: Sequence[dict[str, float]], ranks: Ranks) -> dict[str, float]:
    """Return the metrics of an optimizer step from this rank's micro-batches, the same on all ranks.

    The micro-batches of all ranks count as if one rank had them. "tokens" becomes "update/tokens".
    """
    total = _merged(ranks.everyone(_merged(parts)))
    names = {"tokens": "update/tokens"}
    return {names.get(name, name.removesuffix(WEIGHTED)): value for name, value in total.items()}


def _merged(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several micro-batches together, as those of a single one."""
    tokens = sum(part["tokens"] for part in parts)

    def merge(name: str) -> float:
        if name.endswith(MAX):
            return max(part[name] for part in parts)
        if name in ("loss", "tokens") or name.endswith(WEIGHTED):
            return sum(part[name] for part in parts)
        return sum(part[name] * part["tokens"] for part in parts) / max(tokens, 1)

    return {name: merge(name) for name in parts[0]}
