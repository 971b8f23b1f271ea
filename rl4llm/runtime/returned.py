"""Check what an algorithm returned, and name the line that its author can fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.base_algorithm import BaseAlgorithm, Total
from rl4llm.core.base_backend import TokenLosses, TokenMetrics
from rl4llm.core.errors import AlgorithmError, RL4LLMError
from rl4llm.core.types import Group, TrainBatch
from rl4llm.runtime.raised import line_of, raised

METHODS = "credits", "batch_credits", "compare", "token_losses", "value_losses", "surrogate"
Credits = list[float | list[float]]
"""Of the trajectories of a group: a number, or a list with one for each turn."""


def checked_credits(algorithm: BaseAlgorithm, groups: Sequence[Group], total: Total) -> list[Credits]:
    """Return the credits of each group. Raise AlgorithmError unless they are finite and (G,) or (G, K)."""
    returned = list(_called(algorithm, algorithm.batch_credits, groups, total))
    if len(returned) != len(groups):
        raise _wrong(algorithm, 0, f"credits of {len(returned)} groups", f"those of {len(groups)}")
    return [_credits(algorithm, *pair) for pair in zip(groups, returned, strict=True)]


def _credits(algorithm: BaseAlgorithm, group: Group, returned: Any) -> Credits:
    turns = [trajectory.num_turns for trajectory in group.trajectories]
    size, most = len(turns), max([1, *turns])
    try:
        credits = torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        credits = torch.zeros(())
    per_turn = credits.dim() == 2 and len(credits) == size and credits.shape[1] >= most
    if not per_turn and credits.shape != (size,):
        accepted = f"shape ({size},), a number for each trajectory, or ({size}, {most}), one for each turn"
        raise _wrong(algorithm, 0, f"credits of {_shape(returned)}", accepted)
    rows = credits.tolist()
    numbers: Credits = [row[:count] for row, count in zip(rows, turns, strict=True)] if per_turn else rows
    if not all(map(math.isfinite, chain.from_iterable(numbers) if per_turn else numbers)):  # type: ignore[arg-type]
        accepted = "finite numbers; a deviation that may be 0 needs + 1e-6"
        raise _wrong(algorithm, 0, f"credits that are not finite, {numbers!s:.100}", accepted)
    return numbers


def checked_losses(algorithm: BaseAlgorithm, *, critic: bool = False) -> TokenLosses:
    """Return `token_losses` or `value_losses`, which then raise AlgorithmError unless each token has a loss with a gradient.

    Nothing in it waits for a GPU.
    """
    method: Callable[..., Any] = algorithm.value_losses if critic else algorithm.token_losses

    def losses(
        batch: TrainBatch, numbers_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        returned = _called(algorithm, method, batch, numbers_BT, *(() if critic else (entropy_BT,)))
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise _wrong(algorithm, 3, _shape(returned), "(losses_BT, metrics), without metrics {}")
        losses_BT, metrics = returned
        for name, numbers in (("losses", losses_BT), *metrics.items()):
            if not isinstance(numbers, Tensor) or numbers.shape != numbers_BT.shape:
                accepted = f"{_shape(numbers_BT)}, a number for each token, without a mean or sum"
                raise _wrong(algorithm, 3, f"{name} of {_shape(numbers)}", accepted)
        if numbers_BT.requires_grad and not losses_BT.requires_grad:
            raise _wrong(algorithm, 3, "losses without a gradient", "losses of its log-probs or values")
        return losses_BT, dict(metrics)

    return losses


def _called(algorithm: BaseAlgorithm, method: Callable[..., Any], *given: Any) -> Any:
    try:
        return method(*given)
    except (RL4LLMError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the user's own code, whose line the message then names
        if type(algorithm).__module__.startswith("rl4llm."):
            raise
        raise AlgorithmError(raised(f"algorithm {type(algorithm).__name__}", error)) from error


def _wrong(algorithm: BaseAlgorithm, first: int, returned: str, accepted: str) -> AlgorithmError:
    """Return an error with the line of the user's class, of one of `METHODS` from `first` on if it has one."""
    line = line_of(type(algorithm), METHODS[first:])
    where = f" ({line})" if line else ""
    return AlgorithmError(
        f"algorithm {type(algorithm).__name__} returned {returned}. Accepted: {accepted}{where}."
    )


def _shape(item: Any) -> str:
    return f"shape {tuple(item.shape)}" if isinstance(item, Tensor) else f"type {type(item).__name__}"
