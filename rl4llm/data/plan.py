"""Plan the micro-batches of a rollout before a run, as if every trajectory were as long as it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl4llm.core.types import TrainBatch
from rl4llm.data.layouts import LAYOUTS, Lengths


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """The largest size of a rollout on one rank, in which every trajectory is as long as it may be."""

    prompts: int
    samples: int
    roles: int
    prompt_tokens: int
    new_tokens: int

    @property
    def trajectories(self) -> int:
        return self.prompts * self.samples * self.roles

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class BatchPlan(RolloutSize):
    """How a rollout becomes micro-batches if every trajectory is as long as it may be.

    `tokens` and `sequences` count, for each micro-batch of an optimizer step, the computed tokens with padding, and the
    sequences.
    """

    updates: int
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]

    def table(self) -> list[dict[str, object]]:
        rows = {
            "prompts per rollout": self.prompts,
            "samples per prompt": self.samples,
            **({"roles that learn": self.roles} if self.roles > 1 else {}),
            "trajectories per rollout": self.trajectories,
            "optimizer steps per rollout": self.updates,
            "longest trajectory (tokens)": self.longest,
            "micro-batches per optimizer step, at most": len(self.tokens),
            "tokens per micro-batch, at most": max(self.tokens),
            "tokens computed per optimizer step, at most": sum(self.tokens),
        }
        return [{"what": what, "value": value} for what, value in rows.items()]


def plan_batches(
    *,
    prompts: int,
    samples: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_tokens_per_batch: int,
    layout: str,
    updates: int = 1,
    roles: int = 1,
) -> BatchPlan:
    """Return how prompts x samples x roles become micro-batches if every trajectory is as long as it may be."""
    longest = max_prompt_tokens + max_new_tokens
    groups = math.ceil(prompts * roles / updates)
    order = np.arange(groups * samples)
    shared = np.where(order % samples, max_prompt_tokens, 0)
    lengths = Lengths(np.full_like(order, longest), np.full_like(order, max_prompt_tokens), order, shared)
    batches = LAYOUTS[layout](lengths, max_tokens_per_batch).by_batch()
    return BatchPlan(
        prompts,
        samples,
        roles,
        max_prompt_tokens,
        max_new_tokens,
        updates=updates,
        tokens=tuple(int((piece.position + piece.length - piece.shared).sum()) for piece in batches),
        sequences=tuple(len(piece.length) for piece in batches),
    )


def is_computed(batch: TrainBatch) -> Tensor:
    """Return which tokens (B, T) are computed: all except padding, and those that prefix sharing leaves out."""
    if batch.computed_BT is None:
        return batch.segment_ids_BT > 0
    return batch.computed_BT == torch.arange(batch.computed_BT.shape[1], device=batch.computed_BT.device)
