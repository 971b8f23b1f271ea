"""Weights that correct for the difference between the policy that sampled and the policy that learns.

The engine's log-probs ("sampled") differ from those that the trainer computes ("old"): kernels or dtypes differ, or the
engine's weights are a few versions older. w = exp(old - sampled) is the importance weight of a token. The product of w over
a trajectory, W, is the weight of the trajectory. Rounding adds up: bf16 autocast lowers log W by 5.6 over 8,000 tokens.
The geometric mean of w does not grow with the length. Log-probs are those before top-p and top-k, which no weight corrects.

A mask does not change the divisor of the loss: a masked token counts as a token with loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl4llm.algorithms.sequences import sequence_mean, sequence_sum
from rl4llm.core.tables import CORRECTIONS
from rl4llm.core.types import TrainBatch


def correction_weights(batch: TrainBatch, name: str, low: float, high: float) -> Tensor:
    """Return the weight of each token's policy loss (B, T), without gradient; 0 except at the policy's tokens."""
    log_BT = (batch.old_logprobs_BT - batch.sampled_logprobs_BT).masked_fill(~batch.mask_BT, 0.0)
    return CORRECTIONS[name](log_BT, batch, low, high) * batch.mask_BT


def importance(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return w unchanged: it is unbiased, but its variance is unbounded."""
    return log_BT.exp()


def truncated(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return min(w, high): truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly...")."""
    return log_BT.exp().clamp(max=high)


def icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return w where it is between low and high, else 0 (Ling team 2025, IcePop)."""
    return _within(log_BT.exp(), log_BT.exp(), low, high)


def token_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return 1 where w is between low and high, else 0."""
    return _within(log_BT.exp(), torch.ones_like(log_BT), low, high)


def sequence_truncated(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return min(W, high), where W is the product of w over the trajectory."""
    return sequence_sum(log_BT, batch).exp().clamp(max=high)


def sequence_icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return W where it is between low and high, else 0: masked importance sampling.

    Liu et al. 2025, "When speed kills stability".
    """
    weights_BT = sequence_sum(log_BT, batch).exp()
    return _within(weights_BT, weights_BT, low, high)


def sequence_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return 1 where W is between low and high, else 0."""
    return _within(sequence_sum(log_BT, batch).exp(), torch.ones_like(log_BT), low, high)


def geometric_mask(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return 1 where the geometric mean of w is between low and high, else 0."""
    return _within(sequence_mean(log_BT, batch).exp(), torch.ones_like(log_BT), low, high)


def geometric_mask_is(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return w where its geometric mean is between low and high, else 0."""
    return _within(sequence_mean(log_BT, batch).exp(), log_BT.exp(), low, high)


def geometric_icepop(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return the geometric mean of w where it is between low and high, else 0."""
    weights_BT = sequence_mean(log_BT, batch).exp()
    return _within(weights_BT, weights_BT, low, high)


def geometric_clip(log_BT: Tensor, batch: TrainBatch, low: float, high: float) -> Tensor:
    """Return the geometric mean of w, clipped to low and high."""
    return sequence_mean(log_BT, batch).exp().clamp(low, high)


def _within(judged_BT: Tensor, weight_BT: Tensor, low: float, high: float) -> Tensor:
    inside_BT = (judged_BT >= low) & (judged_BT <= high)
    # not a product: the weight of a long trajectory may be infinite
    return torch.where(inside_BT, weight_BT, 0.0)
