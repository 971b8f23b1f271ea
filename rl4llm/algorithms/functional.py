"""The formulas that algorithms share. G trajectories of a group, B rows, T tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl4llm.core.base_algorithm import KLEstimator, Total


def differ(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by more than float32 rounding; 0.1 + 0.2 and 0.3 do not."""
    return len(rewards) > 0 and not math.isclose(min(rewards), max(rewards), rel_tol=1e-6, abs_tol=1e-9)


def group_advantages(rewards_G: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return (reward - mean) / (sample standard deviation (ddof 1) + eps) (G,); a group of one gets 0.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2. The paper leaves ddof open; 1 is what verl, TRL and OpenRLHF use.
    """
    centred_G = rewards_G - rewards_G.mean()
    if not scale or len(rewards_G) < 2:
        return centred_G
    return centred_G / (rewards_G.std(correction=1) + eps)


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """Return each reward minus the mean of the others (G,); a group of one gets 0. Kool et al. 2019, equation 9."""
    size = len(rewards_G)
    return (rewards_G - rewards_G.mean()) * (size / max(size - 1, 1))


def deviation(numbers: Sequence[Tensor], total: Total) -> Tensor:
    """Return the sample standard deviation () of all numbers of all ranks, float64; 0 for a single one."""
    flat_N = torch.cat([torch.zeros(0, dtype=torch.float64), *numbers])
    count, summed = total(torch.stack([flat_N.new_tensor(len(flat_N)), flat_N.sum()]))
    return (total((flat_N - summed / count.clamp(min=1)).square().sum()) / (count - 1).clamp(min=1)).sqrt()


def clipped_surrogate(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's pessimistic loss (B, T): -min(r A, clip(r, 1 - low, 1 + high) A). Schulman et al. 2017, equation 7."""
    unclipped_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high) * advantages_BT
    return -unclipped_BT.minimum(clipped_BT)


def clipped_share(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float) -> Tensor:
    """Return 1 where the clip cuts the gradient: the ratio is beyond the bound on the side the advantage pushes to."""
    return ((ratio_BT > 1 + high) & (advantages_BT > 0) | (ratio_BT < 1 - low) & (advantages_BT < 0)).to(
        ratio_BT.dtype
    )


def dual_clip(loss_BT: Tensor, advantages_BT: Tensor, bound: float) -> Tensor:
    """Limit the loss of negative advantages to -bound A, however large the ratio. Ye et al. 2020, equation 3."""
    return loss_BT.minimum(-bound * advantages_BT).where(advantages_BT < 0, loss_BT)


def clipped_value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None
) -> Tensor:
    """Return half the squared error (B, T), at least that of the value clipped to within `clip` of the old one.

    This is the loss of Schulman's PPO code; SkyRL averages it per sequence, others per token.
    """
    error_BT = (values_BT - returns_BT).square()
    if clip is not None:
        held_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        error_BT = error_BT.maximum((held_BT - returns_BT).square())
    return error_BT / 2


def kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (B, T) (Schulman 2020, "Approximating KL divergence").

    With d = log(policy / reference): k1 = d is unbiased but noisy and may be negative; k2 = d^2 / 2 is biased with little
    noise; k3 = exp(-d) - 1 + d is unbiased and never negative. As values, k3+ is k3.
    """
    difference_BT = logprobs_BT - ref_logprobs_BT
    if estimator == "k1":
        return difference_BT
    if estimator == "k2":
        return difference_BT.square() / 2
    return (-difference_BT).exp() - 1 + difference_BT


def kl_loss(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimate as a loss on sampled tokens (B, T) whose gradient lowers the divergence.

    The gradient of k2 is in expectation that of KL(policy || reference). That of k1 is zero in expectation, so as a loss it
    keeps its value and takes k2's gradient; so does k3+. k3's own gradient is that of KL(reference || policy), which has the
    same minimum.
    """
    estimate_BT = kl(logprobs_BT, ref_logprobs_BT, estimator)
    if estimator in ("k2", "k3"):
        return estimate_BT
    k2_BT = kl(logprobs_BT, ref_logprobs_BT, "k2")
    return k2_BT + (estimate_BT - k2_BT).detach()
