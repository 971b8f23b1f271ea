"""The contract of algorithms: two questions, how good was each trajectory, and what does each token lose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class Needs:
    """What an algorithm asks of the trainer; the trainer asks for needs, never for names."""

    critic: bool = False
    reference: bool = False
    entropy: bool = False
    group: bool = False  # at least two trajectories per prompt
    every_token: bool = True  # False: a trajectory whose credit is 0 has no loss, and need not be computed
    demonstrations: bool = False  # learns from conversations in the dataset instead of sampling its own
    reward_kl: tuple[float, str] | None = None  # (coefficient, estimator) of a KL penalty inside the reward


class BaseAlgorithm(ABC):
    """Pure maths on tensors. Subclasses are dataclasses whose fields are the algorithm's options.

    `aggregation` names how token losses are summed, see `rl4llm.data.pack`. Among a batch's token metrics, a name that ends
    in "/max" is reported as the maximum over the policy's tokens, every other as their mean.
    """

    __slots__ = ()
    aggregation: str

    def needs(self) -> Needs:
        """What this algorithm, with these options, needs."""
        return Needs()

    def keep(self, group: Group) -> bool:
        """Whether a group trains at all."""
        return True

    def credits(self, group: Group) -> Tensor:
        """One number per trajectory (G,): how much better than expected it was."""
        return group.rewards_G

    def assign(self, batch: TrainBatch) -> None:
        """Fill `advantages_BT` (and `returns_BT`) from `credits_BT`, which holds the credit on each sampled token."""
        batch.advantages_BT = batch.credits_BT

    @abstractmethod
    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        """The loss of each token (B, T), and metrics of the same shape. No reduction happens here."""

    def value_losses(self, batch: TrainBatch, values_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        """The critic's loss of each token (B, T); only asked when `needs().critic`."""
        raise TypeError(f"{type(self).__name__} has no critic, so it has no value loss.")

    def check(self, group_size: int) -> None:
        """Raise ConfigError for options that cannot work together."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__.lower()
