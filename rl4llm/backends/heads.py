"""From hidden states to one number per token: its log-prob, or the value of the state before it.

This is the only place that shifts: what is said of token t comes from the hidden state of the token before it. Only
tokens of the policy are asked about, so the logits of prompts are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl4llm.core.kernels import linear, weight_gradient
from rl4llm.core.types import TrainBatch

KEEP_BYTES = 64 << 20
"""So much of the fp32 logits is kept for the backward pass; the rest is computed again."""

SLICE_BYTES = 31 << 20
"""Size of the fp32 logits that exist at once. Blocks of 32 MiB and more, malloc would take from the kernel each time."""

MIN_SLICE = 256


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

    def to(self, dtype: torch.dtype) -> OutputLayer:
        """A copy whose products run in `dtype`."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return OutputLayer(self.weight_VD.to(dtype), bias_V, self.softcap)


class ValueHead(nn.Module):
    """The critic's head: one number per hidden state, 0 before training."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return self.linear(hidden_ND.to(self.linear.weight.dtype)).squeeze(-1).float()


def asked_tokens(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Flat positions (N,), b * T + t, of the policy's tokens that have a token before them, and of those before them."""
    columns = batch.token_ids_BT.shape[1]
    before_BT = _previous(batch)
    asked_N = (batch.mask_BT & (before_BT >= 0)).flatten().nonzero().squeeze(1)
    before_N = asked_N.div(columns, rounding_mode="floor") * columns + before_BT.flatten()[asked_N]
    return asked_N, before_N


def token_logprobs(
    hidden_SD: Tensor,
    place_BT: Tensor,
    batch: TrainBatch,
    output: OutputLayer | None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (B, T), fp32, of the policy's tokens under the softmax at `temperature`; 0 for all others.

    `hidden_SD` holds the S hidden states that were computed, `place_BT` says which of them is each token's; without an
    `output` layer they are logits already. With `entropy`, also the entropy (B, T) of the distribution that each token
    was drawn from.
    """
    asked_N, before_N = asked_tokens(batch)
    hidden_ND = hidden_SD.index_select(0, place_BT.flatten()[before_N])
    targets_N = batch.token_ids_BT.flatten()[asked_N]
    if output is None:
        logprobs_N, entropy_N = logprobs_of_logits(hidden_ND, targets_N, temperature=temperature, entropy=entropy)
    else:
        logprobs_N, entropy_N = selected_logprobs(hidden_ND, output, targets_N, temperature=temperature, entropy=entropy)
    return _spread(logprobs_N, asked_N, batch), _spread(entropy_N, asked_N, batch) if entropy else None


def token_values(hidden_SD: Tensor, place_BT: Tensor, batch: TrainBatch, value_head: ValueHead) -> Tensor:
    """Values (B, T), fp32, of the state before each of the policy's tokens; 0 for all others."""
    asked_N, before_N = asked_tokens(batch)
    return _spread(value_head(hidden_SD.index_select(0, place_BT.flatten()[before_N])), asked_N, batch)


def selected_logprobs(
    hidden_ND: Tensor,
    output: OutputLayer,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    keep_bytes: int = KEEP_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-prob (N,) of each target and, with `entropy`, the entropies (N,) (else zeros); both fp32.

    Logits are computed a slice of the vocabulary at a time, and again in the backward pass where they were not kept.
    Slices of the vocabulary, not of the rows: each weight is then read once, and its gradient needs no accumulation.
    """
    plan = _Plan(temperature, output.softcap, entropy, keep_bytes, slice_bytes)
    return _SelectedLogprobs.apply(hidden_ND, output.weight_VD, output.bias_V, targets_N, plan)


def logprobs_of_logits(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """The same two from logits, for models that do more between hidden states and logits than one layer."""
    logp_NV = (logits_NV.float() / temperature).log_softmax(1)
    logprobs_N = logp_NV.gather(1, targets_N[:, None]).squeeze(1)
    return logprobs_N, -(logp_NV.exp() * logp_NV).sum(1) if entropy else torch.zeros_like(logprobs_N)


def _previous(batch: TrainBatch) -> Tensor:
    """The column of the token before each token, -1 where there is none."""
    if batch.previous_BT is not None:
        return batch.previous_BT
    segments_BT = batch.segment_ids_BT
    columns_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    continues_BT = F.pad(segments_BT[:, 1:] == segments_BT[:, :-1], (1, 0))
    return torch.where(continues_BT, columns_T - 1, -1)


def _spread(values_N: Tensor, positions_N: Tensor, batch: TrainBatch) -> Tensor:
    flat = values_N.new_zeros(batch.token_ids_BT.numel()).index_copy(0, positions_N, values_N)
    return flat.view(batch.token_ids_BT.shape)


@dataclass(frozen=True, slots=True)
class _Plan:
    temperature: float
    softcap: float
    entropy: bool
    keep_bytes: int
    slice_bytes: int

    def slices(self, rows: int, vocabulary: int) -> list[slice]:
        width = max(MIN_SLICE, self.slice_bytes // (4 * max(rows, 1)))
        return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]

    def num_kept(self, rows: int, slices: list[slice]) -> int:
        width = slices[0].stop
        return min(len(slices), self.keep_bytes // (4 * max(rows, 1) * width))


class _SelectedLogprobs(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy: d log p[y] / dz = onehot(y) - p and
    dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, targets_N, plan):
        slices = plan.slices(len(hidden_ND), len(weight_VD))
        num_kept, kept = plan.num_kept(len(hidden_ND), slices) if any(ctx.needs_input_grad) else 0, []
        # Made before the loop: small blocks that outlive the logits beside them would keep malloc from using their place.
        summaries = hidden_ND.new_zeros(3, len(slices), len(hidden_ND), dtype=torch.float32)
        for number, part in enumerate(slices):
            logits_NS = _logits(hidden_ND, weight_VD, bias_V, part)
            if number < num_kept:
                kept.append(logits_NS)
            _summarise(_scores(logits_NS, plan), targets_N - part.start, plan, summaries[:, number])
            del logits_NS
        normalisers_N, scores_N, means_N = _combined(summaries)
        ctx.plan, ctx.num_kept = plan, len(kept)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, normalisers_N, means_N, *kept)
        return scores_N - normalisers_N, normalisers_N - means_N if plan.entropy else torch.zeros_like(scores_N)

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        hidden_ND, weight_VD, bias_V, targets_N, normalisers_N, means_N, *kept = ctx.saved_tensors
        plan = ctx.plan
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if wants_weight else None
        grad_bias_V = torch.empty_like(bias_V) if wants_bias else None
        grads = grad_logprobs_N, grad_entropy_N if plan.entropy else None
        for number, part in enumerate(plan.slices(len(hidden_ND), len(weight_VD))):
            logits_NS = kept[number] if number < len(kept) else _logits(hidden_ND, weight_VD, bias_V, part)
            grad_NS = _grad_scores(_scores(logits_NS, plan), normalisers_N, means_N, targets_N - part.start, grads)
            grad_NS = _grad_logits(grad_NS, logits_NS, plan).to(hidden_ND.dtype)
            if wants_hidden:
                grad_hidden_ND += linear(grad_NS, weight_VD[part].t())
            if wants_weight:
                grad_weight_VD[part] = weight_gradient(grad_NS, hidden_ND)
            if wants_bias:
                grad_bias_V[part] = grad_NS.sum(0)
        grad_hidden_ND = None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: slice) -> Tensor:
    return linear(hidden_ND, weight_VD[part], None if bias_V is None else bias_V[part]).float()


def _scores(logits_NS: Tensor, plan: _Plan) -> Tensor:
    """What the softmax is taken of. May be `logits_NS` itself."""
    if plan.softcap:
        logits_NS = (logits_NS / plan.softcap).tanh_().mul_(plan.softcap)
    return logits_NS if plan.temperature == 1.0 else logits_NS / plan.temperature


def _summarise(scores_NS: Tensor, columns_N: Tensor, plan: _Plan, out_3N: Tensor) -> None:
    """Of one slice: log-sum-exp, the target's score (0 where it lies elsewhere) and the mean score under its softmax."""
    largest_N = scores_NS.amax(1)
    weights_NS = (scores_NS - largest_N[:, None]).exp_()
    sums_N = weights_NS.sum(1)
    if plan.entropy:
        out_3N[2] = weights_NS.mul_(scores_NS).sum(1) / sums_N
    inside_N = (columns_N >= 0) & (columns_N < scores_NS.shape[1])
    picked_N = scores_NS.gather(1, columns_N.clamp(0, scores_NS.shape[1] - 1)[:, None]).squeeze(1)
    out_3N[0] = sums_N.log_().add_(largest_N)
    out_3N[1] = torch.where(inside_N, picked_N, 0.0)


def _combined(summaries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same three of the whole vocabulary, from those of its P slices (3, P, N)."""
    normalisers_PN, scores_PN, means_PN = summaries
    return normalisers_PN.logsumexp(0), scores_PN.sum(0), (normalisers_PN.softmax(0) * means_PN).sum(0)


def _grad_scores(scores_NS, normalisers_N, means_N, columns_N, grads) -> Tensor:
    """The gradient of one slice of the scores. log p + H is score - mean, as both lack the normaliser."""
    grad_logprobs_N, grad_entropy_N = grads
    grad_NS = (scores_NS - normalisers_N[:, None]).exp_()
    if grad_entropy_N is None:
        grad_NS.mul_(-grad_logprobs_N[:, None])
    else:
        pull_NS = (scores_NS - means_N[:, None]).mul_(grad_entropy_N[:, None]).add_(grad_logprobs_N[:, None])
        grad_NS.mul_(pull_NS).neg_()
    inside_N = (columns_N >= 0) & (columns_N < scores_NS.shape[1])
    columns_N = columns_N.clamp(0, scores_NS.shape[1] - 1)
    return grad_NS.scatter_add_(1, columns_N[:, None], torch.where(inside_N, grad_logprobs_N, 0.0)[:, None])


def _grad_logits(grad_NS: Tensor, logits_NS: Tensor, plan: _Plan) -> Tensor:
    if plan.temperature != 1.0:
        grad_NS.div_(plan.temperature)
    if plan.softcap:
        grad_NS.mul_(1 - (logits_NS / plan.softcap).tanh_().square_())
    return grad_NS
