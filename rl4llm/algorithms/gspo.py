"""GSPO: Group Sequence Policy Optimization (Zheng et al. 2025): the ratio is that of the whole answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl4llm.algorithms.functional import clipped_share, clipped_surrogate
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.algorithms.sequences import sequence_mean
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.schema import Positive
from rl4llm.core.types import TrainBatch


@dataclass(slots=True)
class GSPO(PolicyGradient):
    """Clip one ratio per trajectory (equation 5), the geometric mean of its tokens' ratios (equation 7).

    Aggregation is by sequence as in the paper; AReaL aggregates by token, so that long answers weigh more.

    Options:
        clip_low, clip_high: bounds of the ratio, two orders of magnitude smaller than GRPO's: it is a mean over many tokens.
    """

    clip_low: Positive = 3e-4
    clip_high: Positive = 4e-4
    aggregation: str = "sequence"

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        ratio_BT = self.ratio(batch, logprobs_BT)
        loss_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        return loss_BT, {
            "clip_fraction": clipped_share(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        }

    def ratio(self, batch: TrainBatch, logprobs_BT: Tensor) -> Tensor:
        """Return the ratio (B, T), equal at all tokens of a trajectory; the gradient flows through their mean."""
        return sequence_mean(logprobs_BT - batch.old_logprobs_BT, batch).exp()


@dataclass(slots=True)
class GSPOToken(GSPO):
    """GSPO for advantages that differ between tokens, such as those of turns (equation 14).

    Each token's ratio has the value of its trajectory's ratio and the gradient of the token's log-prob. TRL, OpenRLHF and
    NeMo-RL differentiate the mean here too, which mixes the advantages of all tokens.
    """

    def ratio(self, batch: TrainBatch, logprobs_BT: Tensor) -> Tensor:
        return GSPO.ratio(self, batch, logprobs_BT).detach() * (logprobs_BT - logprobs_BT.detach()).exp()
