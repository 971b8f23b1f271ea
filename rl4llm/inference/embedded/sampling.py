"""From logits to tokens: one uniform number per row, which depends only on the request's seed and the token's index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.core.types import SamplingParams

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
AHEAD = 32  # tokens for which uniforms are computed at once
SLICE = 256  # at most so many neighbouring tokens are one slice of a large vocabulary
FIXED_POINT = 2.0**52  # of the unit in which probabilities are added up as integers; their sum is about 1
LARGE = 8192  # tokens of a vocabulary whose slices are added up first, which takes a third of the time


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

    Top-k comes first. Top-p then keeps the smallest set of the remaining tokens with a share of at least top_p.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    sorted_BV = sorted_BV.masked_fill((rank_V >= top_k_B[:, None]) & (top_k_B[:, None] > 0), 0.0)
    total_BV = _running_sums(sorted_BV)
    before_BV = total_BV - sorted_BV
    sorted_BV = sorted_BV.masked_fill(
        (before_BV >= top_p_B[:, None] * total_BV[:, -1:]) & (top_p_B[:, None] < 1), 0.0
    )
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


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
    inner_BS = _running_sums(slices_BPS.take_along_dim(slice_B1[:, :, None], 1)[:, 0])
    last_B1 = inner_BS[:, -1:]
    targets_B1 = torch.minimum(share_B1 * last_B1, last_B1.nextafter(torch.zeros_like(last_B1)))
    return slice_B1 * size + _invert(inner_BS, targets_B1)


def _running_sums(x: Tensor) -> Tensor:
    """Return the cumulative sums of the last dimension, in float64.

    In deterministic mode torch refuses the cumulative sum of floats on a GPU, where their order may change. That of
    integers has no order.
    """
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1, dtype=torch.float64)
    return _fixed_point_sums(x)


def _fixed_point_sums(x: Tensor) -> Tensor:
    return (x.double() * FIXED_POINT).long().cumsum(-1).double() / FIXED_POINT


def _invert(cdf_BN: Tensor, targets_B1: Tensor) -> Tensor:
    """Return the first place where the function exceeds the target; the last one where it never does, as if it is NaN."""
    return torch.searchsorted(cdf_BN, targets_B1, right=True).clamp_(max=cdf_BN.shape[-1] - 1)


class Sampler:
    """Draws the next token of each row; rows may differ in every parameter. A change of rows needs a new sampler."""

    def __init__(self, params: Sequence[SamplingParams], starts: Sequence[int], device: torch.device):
        self._seeds = [item.seed for item in params]
        self._next = list(starts)
        self._uniforms_NB: Tensor | None = None
        self._used = 0
        greedy = [item.temperature == 0 for item in params]
        heat = [item.temperature or 1.0 for item in params]
        filtered = [row for row, item in enumerate(params) if item.top_k or item.top_p < 1]
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        self._heat_B1 = torch.tensor(heat, device=device)[:, None] if set(heat) != {1.0} else None
        self._filtered = torch.tensor(filtered, device=device) if filtered and not self._all_greedy else None
        if self._filtered is not None:
            self._top_k = torch.tensor([params[row].top_k for row in filtered], device=device)
            self._top_p = torch.tensor(
                [params[row].top_p for row in filtered], device=device, dtype=torch.float64
            )

    def __call__(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B,) and their log-probs (B,) by the temperature-scaled softmax; NaN logits give NaN."""
        logits_BV = logits_BV.float()
        if self._heat_B1 is not None:
            logits_BV = logits_BV / self._heat_B1
        probs_BV = logits_BV.softmax(-1)
        tokens_B1 = (
            logits_BV.argmax(-1, keepdim=True) if self._all_greedy else self._draw(logits_BV, probs_BV)
        )
        return tokens_B1[:, 0], probs_BV.gather(-1, tokens_B1)[:, 0].log()

    def _draw(self, logits_BV: Tensor, probs_BV: Tensor) -> Tensor:
        if self._filtered is not None:
            kept = keep_likely(probs_BV[self._filtered], self._top_k, self._top_p)
            probs_BV = probs_BV.index_copy(0, self._filtered, kept)
        tokens_B1 = draw(probs_BV, self._uniform(probs_BV.device)[:, None])
        if self._greedy_B is not None:
            tokens_B1 = torch.where(self._greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), tokens_B1)
        return tokens_B1

    def _uniform(self, device: torch.device) -> Tensor:
        if self._uniforms_NB is None or self._used == AHEAD:
            self._uniforms_NB = torch.from_numpy(uniforms(self._seeds, self._next, AHEAD)).to(device)
            self._next = [start + AHEAD for start in self._next]
            self._used = 0
        self._used += 1
        return self._uniforms_NB[self._used - 1]
