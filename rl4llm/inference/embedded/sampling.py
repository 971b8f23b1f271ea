"""From logits to tokens: one uniform number per row, which depends only on the request's seed and the token's index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.core.types import SamplingParams

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
PERIOD = 64  # steps after which what was sampled is read, so a NaN is detected, and for which uniforms are computed
SLICE = 256  # at most so many neighbouring tokens are one slice of a large vocabulary
FIXED_POINT = 2.0**52  # of the unit in which probabilities are added up as integers; their sum is about 1
LARGE = 8192  # a vocabulary from here on is drawn from by slices, in a third of the time, and rarely sorted
CANDIDATES = 1024  # likeliest tokens of a large vocabulary, usually more than top-k and top-p keep
MARGIN = 2.0**-30  # of a sum of probabilities; far above the rounding error of sums in any order


def uniforms(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """Return numbers in [0, 1) for tokens start .. start + count - 1 of each seed's completion, float64 (count, B).

    It is the splitmix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). Its state
    is a mixed seed, so that neighbouring seeds share nothing.
    """
    mixed_B = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) ^ GOLDEN_GAMMA)
    tokens = np.arange(1, count + 1, dtype=np.uint64)[:, None] + np.array(starts, dtype=np.uint64)
    return (_mix(mixed_B + tokens * GOLDEN_GAMMA) >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def keep_likely(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Set the probabilities of all but the likely tokens to 0, without normalising; top_k 0 and top_p 1 keep everything.

    Top-k comes first. Top-p then keeps the smallest set of the remaining tokens with a share of at least top_p. Of equally
    likely tokens, those with lower ids come first. Of a large vocabulary, only rows that may keep more tokens than there are
    candidates are sorted.
    """
    if probs_BV.shape[-1] < LARGE:
        return _keep_sorted(probs_BV, top_k_B, top_p_B)
    kept_BV, certain_B = _keep_candidates(probs_BV, top_k_B, top_p_B)
    uncertain = [row for row, certain in enumerate(certain_B.tolist()) if not certain]
    if not uncertain:
        return kept_BV
    rows = torch.tensor(uncertain, device=probs_BV.device)
    return kept_BV.index_copy_(0, rows, _keep_sorted(probs_BV[rows], top_k_B[rows], top_p_B[rows]))


def _keep_sorted(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Do what `keep_likely` does, by sorting the whole vocabulary."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV = _cut_top_k(sorted_BV, top_k_B)
    total_BV = _running_sums(sorted_BV)
    before_BV = total_BV - sorted_BV
    sorted_BV = sorted_BV.masked_fill(
        (before_BV >= top_p_B[:, None] * total_BV[:, -1:]) & (top_p_B[:, None] < 1), 0.0
    )
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def _keep_candidates(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_keep_sorted` returns if only the likeliest tokens matter, and whether that is certain for each row.

    `torch.topk` promises no order of equal values, and may choose any of those that equal the last candidate. So a row is
    certain only if all that it keeps exceeds its last candidate. Sums in another order are rounded differently. So a row is
    uncertain if one of its sums is within `MARGIN` of the limit of top-p.
    """
    chosen_BC = probs_BV.topk(CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
    sorted_BC, places_BC = probs_BV.gather(-1, chosen_BC).sort(dim=-1, descending=True, stable=True)
    last_B1, limited_B1 = sorted_BC[:, -1:], top_p_B[:, None] < 1
    cut_BC = _cut_top_k(sorted_BC, top_k_B)
    sums_BC = _running_sums(cut_BC)
    total_B1 = torch.where(
        top_k_B[:, None] > 0, sums_BC[:, -1:], probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
    )
    beyond_BC = sums_BC - cut_BC - top_p_B[:, None] * total_B1
    kept_BC = cut_BC.masked_fill((beyond_BC >= 0) & limited_B1, 0.0)
    close_B = ((beyond_BC.abs() <= MARGIN * total_B1) & limited_B1).any(-1)
    inside_B = ((kept_BC == 0) | (kept_BC > last_B1)).all(-1)  # false for NaN
    order_BC = chosen_BC.gather(-1, places_BC)
    kept_BV = torch.zeros_like(probs_BV).scatter_(-1, order_BC, kept_BC)
    return kept_BV, inside_B & ~close_B & (top_k_B <= CANDIDATES)


def _cut_top_k(sorted_BN: Tensor, top_k_B: Tensor) -> Tensor:
    """Set all but the first top_k of descending probabilities to 0; top_k 0 keeps everything."""
    rank_N = torch.arange(sorted_BN.shape[-1], device=sorted_BN.device)
    return sorted_BN.masked_fill((rank_N >= top_k_B[:, None]) & (top_k_B[:, None] > 0), 0.0)


def draw(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return tokens (B, 1) with probabilities in proportion to weights, by the inverse of the distribution function.

    The weights are a part of a softmax, so their sum is at most about 1.
    """
    vocabulary = weights_BV.shape[-1]
    size = math.gcd(vocabulary, SLICE)
    if vocabulary < LARGE or size < SLICE // 8:
        cdf_BV = _running_sums(weights_BV)
        return _invert(cdf_BV, uniforms_B1 * cdf_BV[:, -1:])
    slices_BPS = weights_BV.unflatten(-1, (-1, size))
    cdf_BP = _running_sums(slices_BPS.sum(-1))
    targets_B1 = uniforms_B1 * cdf_BP[:, -1:]
    slice_B1 = _invert(cdf_BP, targets_B1)
    ends = cdf_BP.gather(-1, slice_B1), F.pad(cdf_BP, (1, 0)).gather(-1, slice_B1)
    share_B1 = (targets_B1 - ends[1]) / (ends[0] - ends[1])  # of the slice, in [0, 1)
    inner_BS = _running_sums(slices_BPS.gather(1, slice_B1[:, :, None].expand(-1, 1, size))[:, 0])
    return slice_B1 * size + _invert(inner_BS, share_B1 * inner_BS[:, -1:])


def _running_sums(x: Tensor) -> Tensor:
    """Return the cumulative sums of the last dimension, in float64.

    In deterministic mode torch refuses the cumulative sum of floats on a GPU, where their order may change. That of
    integers has no order.
    """
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1, dtype=torch.float64)
    return _fixed_point_sums(x)


def _fixed_point_sums(x: Tensor) -> Tensor:
    """Return cumulative sums of integers, which are the same in each order of addition."""
    return (x.double() * FIXED_POINT).long().cumsum(-1).double() / FIXED_POINT


def _invert(cdf_BN: Tensor, targets_B1: Tensor) -> Tensor:
    """Return the first place where the function exceeds the target, which rounding may have made its end; the last place
    where it is NaN."""
    last_B1 = cdf_BN[:, -1:]
    targets_B1 = torch.minimum(targets_B1, last_B1.nextafter(torch.zeros_like(last_B1)))
    return torch.searchsorted(cdf_BN, targets_B1, right=True).clamp_(max=cdf_BN.shape[-1] - 1)


def choose(
    logits_BV: Tensor, probs_BV: Tensor, uniforms_B1: Tensor | None, greedy_B1: Tensor | None
) -> Tensor:
    """Return tokens (B, 1): the likeliest ones of greedy rows, and drawn ones elsewhere.

    Without uniform numbers all rows are greedy, and without `greedy_B1` none is.
    """
    if uniforms_B1 is None:
        return logits_BV.argmax(-1, keepdim=True)
    tokens_B1 = draw(probs_BV, uniforms_B1)
    if greedy_B1 is None:
        return tokens_B1
    return torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), tokens_B1)


def heated(
    logits_BV: Tensor, heat_B1: Tensor | None, absent_A: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits divided by the temperatures, which may overwrite them, and their probabilities in float32.

    Absent ids, which have no token, get the probability 0 and the logit -inf. The others are not normalised again: their
    log-probs stay those of the trainer's softmax over all logits, as with top-k and top-p.
    """
    if heat_B1 is not None:
        logits_BV = logits_BV.float() / heat_B1
    probs_BV = logits_BV.softmax(-1, dtype=torch.float32)
    if absent_A is not None:
        logits_BV.index_fill_(-1, absent_A, -torch.inf)
        probs_BV.index_fill_(-1, absent_A, 0.0)
    return logits_BV, probs_BV


class Kind(NamedTuple):
    """What a sampler has to do for the requests of a batch."""

    draws: bool  # any row is drawn
    greedy: bool  # any row is greedy
    hot: bool  # any row has another temperature than 1
    filters: bool  # any drawn row has top_k or top_p

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Kind:
        drawn = [item for item in params if item.temperature]
        return cls(
            bool(drawn),
            len(drawn) < len(params),
            any(item.temperature != 1 for item in drawn),
            any(item.top_k or item.top_p < 1 for item in drawn),
        )


class StaticSampler:
    """Draws the next token of each row; all its numbers are in tensors that stay in place, for a captured step.

    Rows may differ in every parameter. It does not filter. `place` counts the steps since `refill`; the step increments it.
    """

    def __init__(self, kind: Kind, rows: int, device: torch.device, absent_A: Tensor | None = None):
        self._kind, self._absent_A = kind, absent_A
        self._seeds: list[int] = []
        self._next: list[int] = []
        self.place_1 = torch.zeros(1, dtype=torch.long, device=device)
        self._heat_B1 = torch.ones(rows, 1, device=device)
        self._greedy_B1 = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self._uniforms_NB = torch.zeros(PERIOD, rows, dtype=torch.float64, device=device)

    def set(self, params: Sequence[SamplingParams], starts: Sequence[int]) -> None:
        """Write the parameters of requests, and how many tokens each of them has; rows behind them are padding."""
        self._seeds, self._next = [item.seed for item in params], list(starts)
        count = len(params)
        heat, greedy = (
            [item.temperature or 1.0 for item in params],
            [not item.temperature for item in params],
        )
        self._heat_B1[:count, 0] = torch.tensor(heat, device=self._heat_B1.device)
        self._greedy_B1[:count, 0] = torch.tensor(greedy, device=self._heat_B1.device)
        self.refill()

    def refill(self) -> None:
        """Write the uniform numbers of the next `PERIOD` tokens, and start counting again."""
        if self._kind.draws:
            new_NB = torch.from_numpy(uniforms(self._seeds, self._next, PERIOD))
            self._uniforms_NB[:, : len(self._seeds)] = new_NB.to(self._uniforms_NB.device)
        self._next = [start + PERIOD for start in self._next]
        self.place_1.zero_()

    def __call__(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B,) and their log-probs (B,) by the temperature-scaled softmax; NaN logits give NaN."""
        kind = self._kind
        logits_BV, probs_BV = heated(logits_BV, self._heat_B1 if kind.hot else None, self._absent_A)
        uniforms_B1 = self._uniforms_B1() if kind.draws else None
        likely_BV = self._likely(probs_BV)
        tokens_B1 = choose(logits_BV, likely_BV, uniforms_B1, self._greedy_B1 if kind.greedy else None)
        return tokens_B1[:, 0], probs_BV.gather(-1, tokens_B1)[:, 0].log()

    def _uniforms_B1(self) -> Tensor:
        return self._uniforms_NB.index_select(0, self.place_1).t()

    def _likely(self, probs_BV: Tensor) -> Tensor:
        return probs_BV


class Sampler(StaticSampler):
    """A sampler that also filters, and counts its steps itself. A change of rows needs a new one."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        starts: Sequence[int],
        device: torch.device,
        absent_A: Tensor | None = None,
    ):
        super().__init__(Kind.of(params), len(params), device, absent_A)
        self.set(params, starts)
        self._steps = 0
        rows = [row for row, item in enumerate(params) if item.top_k or item.top_p < 1]
        self._filtered = torch.tensor(rows, device=device, dtype=torch.long)
        self._top_k = torch.tensor([params[row].top_k for row in rows], device=device)
        self._top_p = torch.tensor([params[row].top_p for row in rows], device=device, dtype=torch.float64)

    def __call__(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        if self._steps == PERIOD:
            self.refill()
            self._steps = 0
        sampled = super().__call__(logits_BV)
        self._steps += 1
        return sampled

    def _uniforms_B1(self) -> Tensor:
        return self._uniforms_NB[self._steps][:, None]

    def _likely(self, probs_BV: Tensor) -> Tensor:
        if not self._kind.filters:
            return probs_BV
        likely_FV = keep_likely(probs_BV[self._filtered], self._top_k, self._top_p)
        return probs_BV.index_copy(0, self._filtered, likely_FV)
