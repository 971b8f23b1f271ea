"""DPPO: Divergence Proximal Policy Optimization (Qi et al. 2026, "Rethinking the Trust Region in LLM RL")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import NonNegative, Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class DPPO(PolicyGradient):
    """Weight each token by its ratio to the sampler, unless the total variation between the two is beyond a bound.

    The divergence is that of a token against all others, |p - q| (equation 13). A token beyond the bound has no gradient if
    its advantage pushes it further away. Rare tokens keep theirs: PPO's clip ends at 0.0012 for a token of 0.001. The
    sampler is what the engine recorded, of old samples too, so nothing is recomputed or corrected.

    The squared log-ratio to the sampler pulls every token back, masked ones too (Kimi K2.5, equation 1). verl and SkyRL
    leave it out; verl also cuts the ratio at 20.

    Options:
        clip_low, clip_high: bounds of the divergence, for tokens that became less and more probable.
        log_ratio_coef: coefficient of the squared log-ratio, which is summed like the loss.
    """

    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    log_ratio_coef: NonNegative = 1e-3
    old_logprobs: ClassVar[Literal["sampled"]] = "sampled"  # type: ignore[misc]  # the trust region is around the sampler
    correction: ClassVar[None] = None  # type: ignore[misc]  # the ratio is the importance weight
    correction_low: ClassVar[float] = 0.0  # type: ignore[misc]
    correction_high: ClassVar[float] = 0.0  # type: ignore[misc]

    @classmethod
    def stale_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def needs(self) -> Needs:
        needs = PolicyGradient.needs(self)
        return replace(needs, every_token=needs.every_token or self.log_ratio_coef > 0)

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        log_BT = logprobs_BT - batch.old_logprobs_BT
        drift_BT = self.drift(logprobs_BT.detach(), batch.old_logprobs_BT)
        rises_BT, falls_BT = batch.advantages_BT > 0, batch.advantages_BT < 0
        masked_BT = rises_BT & (drift_BT > self.clip_high) | falls_BT & (drift_BT < -self.clip_low)
        # not a product: the ratio of a masked token may be infinite
        loss_BT = -(batch.advantages_BT * log_BT.masked_fill(masked_BT, 0.0).exp()).masked_fill(
            masked_BT, 0.0
        )
        return loss_BT + self.log_ratio_coef * log_BT.square(), {"clip_fraction": masked_BT.to(log_BT.dtype)}

    def drift(self, logprobs_BT: Tensor, sampled_BT: Tensor) -> Tensor:
        """Return how far each token has moved from the sampler (B, T), positive if it became more probable."""
        return logprobs_BT.exp() - sampled_BT.exp()


@dataclass(slots=True)
class DPPOKL(DPPO):
    """DPPO whose divergence is KL(sampler || policy) of a token against all others, in nats (equation 14)."""

    clip_low: Positive = 0.05
    clip_high: Positive = 0.05

    def drift(self, logprobs_BT: Tensor, sampled_BT: Tensor) -> Tensor:
        tiny = torch.finfo(logprobs_BT.dtype).tiny
        rest_BT, sampled_rest_BT = (-x_BT.expm1().clamp(max=-tiny) for x_BT in (logprobs_BT, sampled_BT))
        log_BT = logprobs_BT - sampled_BT
        kl_BT = sampled_rest_BT * (sampled_rest_BT / rest_BT).log() - sampled_BT.exp() * log_BT
        return kl_BT * log_BT.sign()
