"""Passes of models over micro-batches that few algorithms need, and what is done with their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl4llm.backends.distributions import DivergenceHead
from rl4llm.core.base_backend import BaseBackend, Divergence, TokenMetrics, TokenScorer
from rl4llm.core.errors import EngineError
from rl4llm.core.types import TrainBatch, Trajectory
from rl4llm.runtime.ranks import Ranks


def refer(
    reference: TokenScorer, batch: TrainBatch, divergence: Divergence | None, temperature: float
) -> None:
    """Fill the reference's log-probs of the tokens, and what a divergence from it needs."""
    device = batch.mask_BT.device
    if divergence is None:
        batch.ref_logprobs_BT = reference.forward(batch, temperature=temperature).to(device)
        return
    numbers = reference.refer(batch, divergence.top, temperature=temperature)
    batch.later = {**batch.later, **{name: tensor.to(device) for name, tensor in numbers.items()}}


def head_of(divergence: Divergence, reference: TokenScorer) -> DivergenceHead:
    """Return what compares the policy with the reference in an update; every rank calls it."""
    return DivergenceHead(divergence, None if divergence.top else reference.output())


def number_environments(
    batches: Sequence[TrainBatch], trajectories: Sequence[Trajectory], names: Sequence[str]
) -> None:
    """Fill the number of each token's environment among the names; -1 for another one."""
    numbers = {name: number for number, name in enumerate(names)}
    ids_R = torch.tensor([numbers.get(each.part, -1) for each in trajectories for _ in each.records])
    for batch in batches:
        records_BT = batch.record_ids_BT  # fillers have none
        ids_BT = batch.token_ids_BT * 0 - 1 if records_BT is None else ids_R[records_BT]
        batch.later = {**batch.later, "environment_ids_BT": ids_BT}


def without_unscored(batches: Sequence[TrainBatch], reference: TokenScorer, ranks: Ranks) -> dict[str, float]:
    """Take tokens out of the loss that a reference on a server did not score; return their share on all ranks.

    Raises EngineError if there is no other token.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        unscored_BT = batch.ref_logprobs_BT.isnan() & batch.mask_BT
        counts += torch.tensor([int(unscored_BT.sum()), int(batch.mask_BT.sum())])
        if unscored_BT.any():
            batch.mask_BT = batch.mask_BT & ~unscored_BT
            batch.weights_BT = batch.weights_BT * batch.mask_BT
            batch.later = {name: tensor.nan_to_num() for name, tensor in batch.later.items()}
    unscored, tokens = (float(count) for count in ranks.total(counts))
    if unscored and unscored == tokens:
        problem = reference.problem or "Grammars constrained all of them; see algorithm.teacher_path."
        raise EngineError(f"The teacher scored no token of the step. {problem}")
    return {"reference/unscored": unscored / max(tokens, 1)}


@torch.no_grad()
def fill_entropy(policy: BaseBackend, batch: TrainBatch, temperature: float) -> None:
    """Fill the entropy (B, T), in nats, of the policy's distribution at each of its tokens."""

    def read(_: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None) -> tuple[Tensor, TokenMetrics]:
        assert entropy_BT is not None  # it was requested
        batch.old_entropy_BT = entropy_BT.to(batch.mask_BT.device)
        return torch.zeros_like(logprobs_BT), {}

    policy.forward_backward(batch, read, temperature=temperature, entropy=True)
