"""Heads that give more of a distribution than the log-prob of its token.

Of a reference: its most probable tokens, or the states that its whole distribution comes from. Of the policy: how far it is
from the reference, with the gradient. Logits of the whole vocabulary exist for a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl4llm.backends.heads import (
    BLOCKED,
    GPU_TILE_BYTES,
    TILE_BYTES,
    Allowed,
    OutputLayer,
    allowed_tokens,
    asked_tokens,
    constrained,
    selected_logprobs,
    spread,
)
from rl4llm.core.base_backend import Divergence
from rl4llm.core.types import TrainBatch


@dataclass(frozen=True, slots=True)
class ReferenceHead:
    """Returns log-probs (B, T) and, of the `top` most probable tokens, ids and log-probs (B, T, K).

    With a `top` of 0 it returns log-probs and the states (B, T, D) that the whole distributions come from.
    """

    top: int

    def __call__(
        self, hidden_SD: Tensor, place_BT: Tensor, batch: TrainBatch, output: OutputLayer | None, *,
        temperature: float, entropy: bool, dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        asked_N, once_U, entry_N = asked_tokens(batch)
        states_UD = hidden_SD.index_select(0, place_BT.flatten()[once_U - 1])
        targets_U1, parts = batch.token_ids_BT.flatten()[once_U, None], []
        allowed = allowed_tokens(batch, asked_N, once_U, entry_N)
        for rows in row_tiles(states_UD, output):
            scores_RV = _scores(states_UD[rows], output, temperature, dtype)
            logprobs_RV = _among(scores_RV, allowed, rows).log_softmax(1)
            sampled_R = logprobs_RV.gather(1, targets_U1[rows]).squeeze(1)
            top = logprobs_RV.topk(self.top, 1)[::-1] if self.top else (states_UD[rows],)
            parts.append((sampled_R, *top))
        return tuple(
            spread(torch.cat(numbers)[entry_N], asked_N, batch) for numbers in zip(*parts, strict=True)
        )

    def nothing(self, zeros_BT: Tensor, entropy: bool) -> tuple[Tensor, ...]:
        """Return the same for a batch that asks for no token, with a K or D of 1."""
        zeros_BT1 = zeros_BT[..., None]
        return (zeros_BT, zeros_BT1.long(), zeros_BT1) if self.top else (zeros_BT, zeros_BT1)


@dataclass(frozen=True, slots=True)
class DivergenceHead:
    """Returns log-probs, entropies or None, and the divergence between reference and policy, each (B, T).

    `reference` is the output layer of the reference, which the whole vocabulary needs; None if it computes its own logits.
    """

    divergence: Divergence
    reference: OutputLayer | None = None

    def __call__(
        self, hidden_SD: Tensor, place_BT: Tensor, batch: TrainBatch, output: OutputLayer | None, *,
        temperature: float, entropy: bool, dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        asked_N, once_U, entry_N = asked_tokens(batch)
        # A token that trajectories share may be context in the first, and then has no numbers of the reference there.
        some_U = torch.zeros_like(once_U).scatter_(0, entry_N, torch.arange(len(asked_N)).to(once_U))
        chosen_U = asked_N[some_U]
        states_UD = hidden_SD.index_select(0, place_BT.flatten()[once_U - 1])
        targets_U1 = batch.token_ids_BT.flatten()[once_U, None]
        allowed = allowed_tokens(batch, asked_N, once_U, entry_N)
        top = self.divergence.top
        if top:
            ids_UK, reference_UK, beyond_UK = _top(
                batch, chosen_U, states_UD.shape[1] if output is None else len(output.weight_VD)
            )
        else:
            others_UD = batch.later["ref_states_BTD"].flatten(0, 1)[chosen_U]
        if top and output is not None:
            logprobs_UK, entropy_U = selected_logprobs(
                states_UD, output, torch.cat([targets_U1, ids_UK], 1),
                temperature=temperature, entropy=entropy, dtype=dtype, allowed=allowed,
            )  # fmt: skip
            divergence_U = self.divergence.formula(
                logprobs_UK[:, 1:].masked_fill(beyond_UK, BLOCKED), reference_UK
            )
            numbers: tuple[Tensor, ...] = logprobs_UK[:, 0], entropy_U, divergence_U
        else:

            def measure(policy_RV: Tensor, rows: slice) -> Tensor:
                logprobs_RV = _among(policy_RV, allowed, rows).log_softmax(1)
                sampled_R = logprobs_RV.gather(1, targets_U1[rows]).squeeze(1)
                entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(1) if entropy else sampled_R.detach()
                if top:
                    policy_RK = logprobs_RV.gather(1, ids_UK[rows]).masked_fill(beyond_UK[rows], BLOCKED)
                    pair = policy_RK, reference_UK[rows]
                else:
                    scores_RV = _scores(others_UD[rows], self.reference, temperature, dtype)
                    scores_RV = _among(scores_RV, allowed, rows)
                    width = min(logprobs_RV.shape[1], scores_RV.shape[1])  # one may have more padding
                    pair = logprobs_RV[:, :width].log_softmax(1), scores_RV[:, :width].log_softmax(1)
                return torch.stack([sampled_R, entropy_R, self.divergence.formula(*pair)])

            numbers = _by_rows(states_UD, output, measure, temperature, dtype).unbind()
        logprobs_BT, entropy_BT, divergence_BT = (spread(x[entry_N], asked_N, batch) for x in numbers)
        return logprobs_BT, entropy_BT if entropy else None, divergence_BT

    def nothing(self, zeros_BT: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the same for a batch that asks for no token."""
        return zeros_BT, zeros_BT if entropy else None, zeros_BT


def row_tiles(states_ND: Tensor, output: OutputLayer | None) -> list[slice]:
    """Return slices of the rows whose logits fit into a tile together; all rows if the states are logits already."""
    num_rows = len(states_ND)
    tile_bytes = TILE_BYTES if states_ND.device.type == "cpu" else GPU_TILE_BYTES
    height = max(1, num_rows if output is None else tile_bytes // (4 * len(output.weight_VD)))
    return [slice(top, min(top + height, num_rows)) for top in range(0, num_rows, height)]


def _among(scores_RV: Tensor, allowed: Allowed | None, rows: slice) -> Tensor:
    return constrained(scores_RV, allowed, rows, slice(0, scores_RV.shape[1]))


def _top(batch: TrainBatch, places_U: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and log-probs of the reference's most probable tokens, and which the policy, with `size` tokens, lacks.

    Such padding of a wider reference counts among all others.
    """
    names = ("ref_top_ids_BTK", "ref_top_logprobs_BTK")
    ids_UK, logprobs_UK = (batch.later[name].flatten(0, 1)[places_U] for name in names)
    beyond_UK = ids_UK >= size
    return ids_UK.clamp(max=size - 1), logprobs_UK.masked_fill(beyond_UK, BLOCKED), beyond_UK


def _scores(
    states_RD: Tensor, output: OutputLayer | None, temperature: float, dtype: torch.dtype | None
) -> Tensor:
    """Return what the softmax takes (R, V), fp32 or more, from products of `dtype`."""
    if output is None:
        return states_RD.to(torch.promote_types(states_RD.dtype, torch.float32)) / temperature
    dtype = dtype or states_RD.dtype
    bias_V = None if output.bias_V is None else output.bias_V.to(dtype)
    return OutputLayer(output.weight_VD.to(dtype), bias_V, output.softcap)(states_RD.to(dtype)) / temperature


def _by_rows(
    states_ND: Tensor, output: OutputLayer | None, measure: Callable[[Tensor, slice], Tensor],
    temperature: float, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return the numbers (3, N) that `measure` makes of scores (R, V) and the rows that they are of.

    The backward pass computes the scores again, and adds the gradients of all tiles in fp32.
    """
    dtype = dtype or states_ND.dtype
    if output is not None and torch.is_grad_enabled():
        bias_V = None if output.bias_V is None else output.bias_V.float()
        output = OutputLayer(output.weight_VD.float(), bias_V, output.softcap)

    def numbers(rows: slice) -> Tensor:
        return measure(_scores(states_ND[rows], output, temperature, dtype), rows)

    tiles = row_tiles(states_ND, output)
    return torch.cat(
        [checkpoint(numbers, rows, use_reentrant=False, preserve_rng_state=False) for rows in tiles], 1
    )
