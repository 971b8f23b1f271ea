"""Weights that correct for tokens which other numbers sampled than those that learn.

The engine sampled with its log-probs, the trainer computes its own of the same weights ("old"): other kernels, other dtypes,
or weights that are a few versions older. w = exp(old - sampled) is the importance weight of a token, its product over a
trajectory that of the trajectory, and its geometric mean a measure of the same that does not grow with the length.

Masks keep the divisor of the loss: a token that is masked counts as one whose loss is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl4llm.algorithms.sequences import sequence_mean, sequence_sum
from rl4llm.core.registry import Registry
from rl4llm.core.types import TrainBatch

Correction = Callable[[Tensor, TrainBatch, float, float], Tensor]
"""(log w (B, T), batch, low, high) -> weight of each token's loss (B, T)."""
CORRECTIONS: Registry[Correction] = Registry("algorithm.correction")


def correction_weights(batch: TrainBatch, name: str, low: float, high: float) -> Tensor:
    """The weight of each token's policy loss (B, T), without gradient; 0 off the policy's tokens."""
    log_BT = (batch.old_logprobs_BT - batch.sampled_logprobs_BT).masked_fill(~batch.mask_BT, 0.0)
    return CORRECTIONS[name](log_BT, batch, low, high) * batch.mask_BT


@CORRECTIONS.register("is")
def importance(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """w as it is: unbiased, with a variance that grows without bound."""
    return log_BT.exp()


@CORRECTIONS.register("tis")
def truncated(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """min(w, high): truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly...")."""
    return log_BT.exp().clamp(max=high)


@CORRECTIONS.register("icepop")
def icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """w between low and high, else 0 (Ling team 2025, IcePop)."""
    return _within(log_BT.exp(), log_BT.exp(), low, high)


@CORRECTIONS.register("token_mask")
def token_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """1 where w lies between low and high, else 0."""
    return _within(log_BT.exp(), torch.ones_like(log_BT), low, high)


@CORRECTIONS.register("sequence_tis")
def sequence_truncated(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """min(W, high), W the product over the trajectory."""
    return sequence_sum(log_BT, batch).exp().clamp(max=high)


@CORRECTIONS.register("sequence_icepop")
def sequence_icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """W between low and high, else 0: masked importance sampling (Liu et al. 2025, "When speed kills stability")."""
    weights_BT = sequence_sum(log_BT, batch).exp()
    return _within(weights_BT, weights_BT, low, high)


@CORRECTIONS.register("sequence_mask")
def sequence_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """1 where W lies between low and high, else 0."""
    return _within(sequence_sum(log_BT, batch).exp(), torch.ones_like(log_BT), low, high)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """1 where the geometric mean of w lies between low and high, else 0."""
    return _within(sequence_mean(log_BT, batch).exp(), torch.ones_like(log_BT), low, high)


@CORRECTIONS.register("geometric_mask_is")
def geometric_mask_is(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """w where the geometric mean lies between low and high, else 0."""
    return _within(sequence_mean(log_BT, batch).exp(), log_BT.exp(), low, high)


@CORRECTIONS.register("geometric_icepop")
def geometric_icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """The geometric mean where it lies between low and high, else 0."""
    weights_BT = sequence_mean(log_BT, batch).exp()
    return _within(weights_BT, weights_BT, low, high)


@CORRECTIONS.register("geometric_clip")
def geometric_clip(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """The geometric mean, clipped to low and high."""
    return sequence_mean(log_BT, batch).exp().clamp(low, high)


def _within(judged_BT: Tensor, weight_BT: Tensor, low: float, high: float) -> Tensor:
    inside_BT = (judged_BT >= low) & (judged_BT <= high)
    return torch.where(inside_BT, weight_BT, 0.0)  # not a product: the weight of a long trajectory may be infinite
