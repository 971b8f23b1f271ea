"""From hidden states to one number per token: its log-prob, or the value of the state before it.

This is the only place that shifts: the number of token t comes from the hidden state of the token before it. Only policy
tokens get a number, so the logits of prompts are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.core.model_memory import FP32, ModelShape, Precision
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch
from rl4llm.runtime.cpu import linear, weight_gradient

KEEP_BYTES = 256 << 20
"""So much of the logits, in the dtype of their product, is kept on a CPU for the backward pass; the rest is computed again.

A GPU keeps none: a share that saves time would take gigabytes, since the logits of 8,192 tokens are 5 GB for 152,000 tokens
of a vocabulary, and computing all of them again is about a twentieth of the update of a model of 1.5B.
"""

TILE_ROWS, TILE_BYTES, GPU_TILE_BYTES = 2048, 8 << 20, 128 << 20
"""Rows and size of a tile, the fp32 logits that exist at once: few enough that the passes over them stay in a CPU's cache;
on a GPU many enough that computing a tile takes longer than launching its kernels."""

BLOCKED = -1e30
"""The score of a token that a grammar excludes: its probability is 0, and unlike -inf it keeps every sum finite."""

BITS = "rl4llm.core.allowed:bits"  # loaded where it is needed
Allowed = tuple[Tensor, Tensor]
"""The row of `TrainBatch.allowed_CW` for each of N tokens, -1 for free ones, and that table."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """What turns hidden states into logits: softcap * tanh((weight_VD @ x + bias_V) / softcap), without softcap where 0."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float = 0.0

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V), fp32."""
        logits_NV = linear(hidden_ND, self.weight_VD, self.bias_V).float()
        return self.softcap * torch.tanh(logits_NV / self.softcap) if self.softcap else logits_NV


class ValueHead(nn.Module):
    """The critic's head: one number per hidden state, 0 before training; without a bias, like the score of a classifier."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        # A sum over one number, since FSDP2 accepts no view.
        return self.linear(hidden_ND.to(self.linear.weight.dtype)).sum(-1).float()


def asked_tokens(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the flat positions (N,), b * T + t, of policy tokens with a predecessor, which is on their left; those of the
    tokens that are computed for them (U,), each once for each set of allowed tokens; and the entry of each token among those
    (N,)."""
    device, host = batch.token_ids_BT.device, batch.host or batch
    segments_BT, computed_BT = host.segment_ids_BT, host.computed_BT
    continues_BT = F.pad(segments_BT[:, 1:] == segments_BT[:, :-1], (1, 0))
    asked_N = (host.mask_BT & continues_BT).flatten().nonzero().squeeze(1)
    once_U, entry_N = asked_N, torch.arange(len(asked_N), device=asked_N.device)
    if computed_BT is not None:
        columns = computed_BT.shape[1]
        first_N = asked_N - asked_N % columns + computed_BT.flatten()[asked_N]
        sets = 1
        if host.allowed_ids_BT is not None:  # the same token may be sampled under different grammars
            sets = int(host.allowed_ids_BT.max()) + 2
            first_N = first_N * sets + host.allowed_ids_BT.flatten()[asked_N] + 1
        once_U, entry_N = first_N.unique(return_inverse=True)
        once_U = once_U // sets
    asked_N, once_U, entry_N = (x.to(device, non_blocking=True) for x in (asked_N, once_U, entry_N))
    return asked_N, once_U, entry_N


def allowed_tokens(batch: TrainBatch, asked_N: Tensor, once_U: Tensor, entry_N: Tensor) -> Allowed | None:
    """Return what grammars allowed at each computed token; None if the batch has no grammar."""
    if batch.allowed_ids_BT is None or batch.allowed_CW is None:
        return None
    ids_U = torch.empty_like(once_U)
    ids_U[entry_N] = batch.allowed_ids_BT.flatten()[asked_N]
    return ids_U, batch.allowed_CW


def token_logprobs(
    hidden_SD: Tensor,
    place_BT: Tensor,
    batch: TrainBatch,
    output: OutputLayer | None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs (B, T), fp32, of the policy's tokens under the softmax at `temperature`; 0 for all others.

    `hidden_SD` holds the S hidden states that were computed, `place_BT` says which of them is each token's; without an
    `output` layer they are logits already. What several trajectories share has one log-prob, whose gradient is the sum of
    theirs. `dtype` is that of the matrix products. With `entropy`, also the entropy (B, T) of the distribution that each
    token was drawn from. Where a grammar constrained a token, that distribution is over what it allowed.
    """
    asked_N, once_U, entry_N = asked_tokens(batch)
    allowed = allowed_tokens(batch, asked_N, once_U, entry_N)
    hidden_UD = hidden_SD.index_select(0, place_BT.flatten()[once_U - 1])
    targets_U = batch.token_ids_BT.flatten()[once_U]
    how: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "allowed": allowed}
    if output is None:
        logprobs_U, entropy_U = logprobs_of_logits(hidden_UD, targets_U, **how)
    else:
        logprobs_U, entropy_U = selected_logprobs(hidden_UD, output, targets_U, dtype=dtype, **how)
    logprobs_BT = spread(logprobs_U[entry_N], asked_N, batch)
    return logprobs_BT, spread(entropy_U[entry_N], asked_N, batch) if entropy else None


def token_values(hidden_SD: Tensor, place_BT: Tensor, batch: TrainBatch, value_head: ValueHead) -> Tensor:
    """Return values (B, T), fp32, of the state before each of the policy's tokens; 0 for all others."""
    asked_N, once_U, entry_N = asked_tokens(batch)
    values_U = value_head(hidden_SD.index_select(0, place_BT.flatten()[once_U - 1]))
    return spread(values_U[entry_N], asked_N, batch)


def head_memory(
    shape: ModelShape, precision: Precision, asked: int, *, backward: bool, values: bool = False
) -> int:
    """Return the bytes for the log-probs of `asked` tokens: some tiles of fp32 logits, and the logits kept on a CPU for a
    backward pass.

    In the backward pass also the fp32 gradients of the hidden states and, where the output layer trains, of its weight,
    which are added to the model's own at its end. A value head has one number per token.
    """
    hidden = asked * shape.hidden
    if values:
        return hidden * (precision.weights + FP32)
    logits = asked * shape.vocabulary
    tiles = 3 * min(GPU_TILE_BYTES if precision.gpu else TILE_BYTES, logits * FP32)
    if not backward:
        return hidden * precision.weights + tiles
    logits_bytes = 0 if precision.gpu else min(KEEP_BYTES, logits * precision.computed)
    weight = 0 if shape.adapter else shape.vocabulary * shape.hidden * FP32
    return hidden * (2 * precision.weights + FP32) + tiles + logits_bytes + weight


def selected_logprobs(
    hidden_ND: Tensor,
    output: OutputLayer,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
    allowed: Allowed | None = None,
    keep_bytes: int | None = None,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, (N,) or (N, K), and with `entropy` the entropies (N,) (else meaningless); fp32.

    Logits are computed a tile of rows and vocabulary at a time, in products of `dtype` (default: that of the hidden
    states), and again in the backward pass where they were not kept. The softmax is always computed in fp32, over the
    `allowed` tokens.
    """
    usual_keep, usual_tile = (
        (KEEP_BYTES, TILE_BYTES) if hidden_ND.device.type == "cpu" else (0, GPU_TILE_BYTES)
    )
    keep_bytes = usual_keep if keep_bytes is None else keep_bytes
    tile_bytes = tile_bytes or usual_tile
    plan = _Cuts(
        temperature, output.softcap, entropy, dtype or hidden_ND.dtype, keep_bytes, tile_bytes, allowed
    )
    return _SelectedLogprobs.apply(hidden_ND, output.weight_VD, output.bias_V, targets_N, plan)


def logprobs_of_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    allowed: Allowed | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same two from logits, for models with more than one layer between hidden states and logits."""
    scores_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logp_NV = constrained(scores_NV, allowed, slice(None), slice(0, scores_NV.shape[1])).log_softmax(1)
    logprobs_N = logp_NV.gather(1, targets_N[:, None]).squeeze(1)
    return logprobs_N, -(logp_NV.exp() * logp_NV).sum(1) if entropy else torch.zeros_like(logprobs_N)


def spread(values_N: Tensor, positions_N: Tensor, batch: TrainBatch) -> Tensor:
    """Return values (B, T) or more of tokens at flat positions, 0 elsewhere; each value may be a row of numbers."""
    columns = batch.token_ids_BT.shape[1]
    rows_N = positions_N.div(columns, rounding_mode="floor")
    return values_N.new_zeros(*batch.token_ids_BT.shape, *values_N.shape[1:]).index_put(
        (rows_N, positions_N - rows_N * columns), values_N
    )


@dataclass(frozen=True, slots=True)
class _Tile:
    """`number` counts slices of the vocabulary."""

    rows: slice
    columns: slice
    number: int


@dataclass(frozen=True, slots=True)
class _Cuts:
    temperature: float
    softcap: float
    entropy: bool
    dtype: torch.dtype
    keep_bytes: int
    tile_bytes: int
    allowed: Allowed | None

    def tiles(self, rows: int, vocabulary: int) -> list[_Tile]:
        """In the order of the vocabulary, so that each slice of the weight's gradient is finished before the next."""
        height = min(max(rows, 1), TILE_ROWS)
        width = max(1, self.tile_bytes // (4 * height))
        return [
            _Tile(
                slice(top, min(top + height, rows)),
                slice(start, min(start + width, vocabulary)),
                start // width,
            )
            for start in range(0, vocabulary, width)
            for top in range(0, rows, height)
        ]


class _SelectedLogprobs(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy: d log p[y] / dz = onehot(y) - p and
    dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, plan: _Cuts
    ) -> tuple[Tensor, Tensor]:
        tiles = plan.tiles(len(hidden_ND), len(weight_VD))
        room = plan.keep_bytes if any(ctx.needs_input_grad) else 0
        products: list[Tensor] = []
        # Made before the loop: small blocks that outlive the logits beside them would keep malloc from using their place.
        slices = 1 + max((tile.number for tile in tiles), default=0)
        summaries = hidden_ND.new_zeros(2, slices, len(hidden_ND), dtype=torch.float32)
        targets_NK = targets_N if targets_N.dim() == 2 else targets_N[:, None]
        scores_NK = hidden_ND.new_zeros(targets_NK.shape, dtype=torch.float32)
        for tile in tiles:
            product = _product(hidden_ND, weight_VD, bias_V, tile, plan)
            room -= product.nbytes
            if room >= 0:
                products.append(product)
            scores = _scores(product.float(), plan, tile)
            inside, columns = _inside(targets_NK[tile.rows], tile)
            scores_NK[tile.rows] += torch.where(inside, scores.gather(1, columns), 0.0)
            _summarise(scores, plan, summaries[:, tile.number, tile.rows])
            del product, scores
        normalisers_N, entropy_N = _combined(summaries)
        ctx.plan = plan
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_NK, normalisers_N, entropy_N, *products)
        return (scores_NK - normalisers_N[:, None]).view(targets_N.shape), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_NK, normalisers_N, entropy_N, *products = ctx.saved_tensors
        plan, inputs = ctx.plan, (hidden_ND, weight_VD, bias_V)
        grad_logprobs_NK = grad_logprobs_N.view(targets_NK.shape)
        grads = [
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        for number, tile in enumerate(plan.tiles(len(hidden_ND), len(weight_VD))):
            rows = tile.rows
            product = products[number] if number < len(products) else _product(*inputs, tile, plan)
            logits = product.float()
            grad = _grad_scores(
                _scores(logits, plan, tile), normalisers_N[rows], entropy_N[rows], _inside(targets_NK[rows], tile),
                (grad_logprobs_NK[rows], grad_entropy_N[rows] if plan.entropy else None),
            )  # fmt: skip
            if plan.temperature != 1.0:
                grad.div_(plan.temperature)
            if plan.softcap:
                grad.mul_(1 - (logits / plan.softcap).tanh_().square_())
            _add_products(grads, grad, hidden_ND, weight_VD, tile, plan)
        return (
            *(None if grad is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)),
            None,
            None,
        )


def _product(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tile: _Tile, plan: _Cuts) -> Tensor:
    """Return one tile of the logits, in the dtype of products."""
    bias = None if bias_V is None else bias_V[tile.columns].to(plan.dtype)
    return linear(hidden_ND[tile.rows].to(plan.dtype), weight_VD[tile.columns].to(plan.dtype), bias)


def _add_products(
    grads: list[Tensor | None], grad: Tensor, hidden_ND: Tensor, weight_VD: Tensor, tile: _Tile, plan: _Cuts
) -> None:
    """Add what one tile's gradient of the logits gives to those of the hidden states, the weight and the bias."""
    grad = grad.to(plan.dtype)
    grad_hidden_ND, grad_weight_VD, grad_bias_V = grads
    if grad_hidden_ND is not None:
        grad_hidden_ND[tile.rows] += linear(grad, weight_VD[tile.columns].to(plan.dtype).t())
    if grad_weight_VD is not None:
        grad_weight_VD[tile.columns] += weight_gradient(grad, hidden_ND[tile.rows].to(plan.dtype))
    if grad_bias_V is not None:
        grad_bias_V[tile.columns] += grad.sum(0)


def _scores(logits: Tensor, plan: _Cuts, tile: _Tile) -> Tensor:
    """Return the scores that the softmax takes. They may be `logits` itself."""
    if plan.softcap:
        logits = (logits / plan.softcap).tanh_().mul_(plan.softcap)
    scores = logits if plan.temperature == 1.0 else logits / plan.temperature
    return constrained(scores, plan.allowed, tile.rows, tile.columns)


def constrained(scores: Tensor, allowed: Allowed | None, rows: slice, columns: slice) -> Tensor:
    """Return the scores of some tokens (rows) and a part of the vocabulary (columns) without those that are not allowed."""
    if allowed is None:
        return scores
    ids_R, words_CW = allowed[0][rows], allowed[1]
    blocked_RV = ~load(BITS)(words_CW[ids_R], columns)  # padding of the output layer too
    return scores.masked_fill(blocked_RV & (ids_R >= 0)[:, None], BLOCKED)


def _inside(targets_NK: Tensor, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return which targets lie in a tile's slice of the vocabulary, and their columns there; any column for the others."""
    columns_NK = targets_NK - tile.columns.start
    width = tile.columns.stop - tile.columns.start
    return (columns_NK >= 0) & (columns_NK < width), columns_NK.clamp(0, width - 1)


def _summarise(scores: Tensor, plan: _Cuts, out_2N: Tensor) -> None:
    """Write log-sum-exp and the entropy of the softmax of one tile."""
    largest_N = scores.amax(1)
    below = scores - largest_N[:, None]
    weights = below.exp() if plan.entropy else below.exp_()
    sums_N = weights.sum(1)
    if plan.entropy:
        out_2N[1] = sums_N.log() - weights.mul_(below).sum(1) / sums_N
    out_2N[0] = sums_N.log_().add_(largest_N)


def _combined(summaries: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the two numbers of each of P slices of the vocabulary (2, P, N) into those of the whole."""
    normalisers_PN, entropies_PN = summaries
    shares_PN = normalisers_PN.log_softmax(0)
    return (
        normalisers_PN.logsumexp(0),
        (shares_PN.exp() * (entropies_PN - shares_PN)).sum(0),
    )


def _grad_scores(
    scores: Tensor,
    normalisers_N: Tensor,
    entropy_N: Tensor,
    places: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Return the gradient of one tile of the scores."""
    (inside_NK, columns_NK), (grad_logprobs_NK, grad_entropy_N) = places, grads
    grad_logprobs_N = grad_logprobs_NK.sum(1)
    grad = (scores - normalisers_N[:, None]).exp_()
    if grad_entropy_N is None:
        grad.mul_(-grad_logprobs_N[:, None])
    else:
        pull = (
            (scores - (normalisers_N - entropy_N)[:, None])
            .mul_(grad_entropy_N[:, None])
            .add_(grad_logprobs_N[:, None])
        )
        grad.mul_(pull).neg_()
    return grad.scatter_add_(1, columns_NK, torch.where(inside_NK, grad_logprobs_NK, 0.0))
