"""Divergences between two distributions, and the tail that makes one of the most probable outcomes alone."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

DivergenceKind = Literal["forward", "reverse", "jensen_shannon"]
"""See `divergence`."""


def divergence(policy_NK: Tensor, reference_NK: Tensor, kind: DivergenceKind, alpha: float = 0.5) -> Tensor:
    """Return how far two distributions over the same K outcomes are from each other (N,), from their log-probs.

    With S the policy, T the reference and M = (1 - alpha) S + alpha T: "forward" is KL(T || S), "reverse" KL(S || T), and
    "jensen_shannon" (1 - alpha) KL(S || M) + alpha KL(T || M) (Agarwal et al. 2024, GKD, equation 1).
    """
    if kind == "forward":
        return _kl(reference_NK, policy_NK)
    if kind == "reverse":
        return _kl(policy_NK, reference_NK)
    mixture_NK = torch.logaddexp(policy_NK + math.log1p(-alpha), reference_NK + math.log(alpha))
    return (1 - alpha) * _kl(policy_NK, mixture_NK) + alpha * _kl(reference_NK, mixture_NK)


def with_tail(logprobs_NK: Tensor) -> Tensor:
    """Append the log-prob of all other outcomes together (N, K + 1).

    A sum over K outcomes alone is smallest where the policy has nothing outside of them; with the rest as one more outcome
    it is a divergence again, at most that of the whole distributions.
    """
    most = -torch.finfo(logprobs_NK.dtype).eps  # rounding may give more than everything
    covered_N1 = logprobs_NK.logsumexp(-1, keepdim=True).clamp(max=most)
    return torch.cat([logprobs_NK, torch.log(-torch.expm1(covered_N1))], -1)


def _kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    return (p_NK.exp() * (p_NK - q_NK)).sum(-1)
