"""The contract of algorithms: how good each trajectory was, and what loss each token has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from torch import Tensor

from rl4llm.core.base_backend import Divergence, TokenMetrics
from rl4llm.core.sample import SampleState
from rl4llm.core.schema import check_fields
from rl4llm.core.types import ChatMessage, Group, TrainBatch, Trajectory

LearnsFrom = Literal[
    "episodes", "demonstrations", "worlds", "conversations", "pairs", "comparisons", "labels"
]
"""What a method learns from. "episodes" are sampled. The others come from a dataset: what the assistant says, what the
environment answers, or both; pairs of a preferred and a rejected answer; answers with a label, good or bad."""

KLEstimator = Literal["k1", "k2", "k3", "k3+"]
"""See `rl4llm.algorithms.functional.kl`."""

Prompt = Sequence[ChatMessage]

Total = Callable[[Tensor], Tensor]
"""The sum of a tensor over all ranks; on one rank the tensor itself."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A value model beside the policy: where it comes from and how it learns.

    Without a `path` it starts from the policy, and without an `lr` it learns at ten times the policy's rate.
    """

    path: str | None = None
    lr: float | None = None
    passes: int = 1  # over a rollout
    warmup_steps: int = 0  # the first steps of a run, in which only the critic learns


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm asks of the trainer; the trainer asks for needs, never for names."""

    learns_from: LearnsFrom = "episodes"
    group: bool = False  # at least two trajectories per prompt
    whole_groups: bool = False  # the trajectories of a prompt must stand in the same micro-batch
    every_token: bool = True  # False: a trajectory whose credit is 0 has no loss, and need not be computed
    entropy: bool = False  # in the loss, with its gradient
    old_entropy: bool = False  # before the updates, as `TrainBatch.old_entropy_BT`; costs a forward pass
    reference: bool = False
    reference_path: str | None = None  # another model than the policy's own start
    reference_url: str | None = None  # of a server that scores tokens in its place, at temperature 1
    references: Mapping[str, str] = field(default_factory=dict)  # by environment: a path, or an address
    divergence: Divergence | None = None  # of policy and reference, as `TrainBatch.ref_divergence_BT`
    reference_every: int = 0  # steps after which the policy becomes the reference; 0 is never
    reference_rate: float = 1.0  # how much of the way to the policy it then moves
    reference_live: bool = False  # it is the policy before the updates of a step, not a further model
    privileged: bool = False  # it reads the policy's tokens behind the prompts of `privileged_prompts`
    # (coefficient, estimator) of a KL penalty on the trajectory's reward
    reward_kl: tuple[float, KLEstimator] | None = None
    old_logprobs: bool = False  # computed by the trainer, else those of the engine
    # only `token_losses` reads them, and takes its own, detached, in the first update, where they are not set: no pass
    old_in_losses: bool = False
    critic: Critic | None = None
    value_head: bool = False  # the model that trains gives values instead of log-probs
    mismatched: bool = False  # `TrainBatch.divergence`, estimated on answers to other prompts
    # one more trajectory per prompt, the most probable one, as `Group.baseline`
    greedy_baseline: bool = False
    sampling: tuple[
        Mapping[str, float], ...
    ] = ()  # fields of SamplingParams by sample index; starts again after the last
    rewards: tuple[str, ...] = ()  # that each trajectory must have, by name
    columns: tuple[str, ...] = ()  # in which each row must have a text
    refills: int = 0  # how often prompts are sampled in place of groups that `keep` refused

    def separate_references(self, adapter: bool) -> list[str | None]:
        """Return the path of each reference that is a further model; None is the start, which an `adapter` may leave."""
        if not self.reference or self.reference_live:
            return []
        if places := [*self.references.values(), *filter(None, [self.reference_url or self.reference_path])]:
            return [place for place in places if not is_address(place)]
        return [] if adapter and not self.reference_every else [None]

    @property
    def served(self) -> bool:
        """Whether a reference is behind a server."""
        return self.reference_url is not None or any(map(is_address, self.references.values()))


def is_address(place: str) -> bool:
    """Return whether a place is the address of a server, not a directory or a name."""
    return place.startswith(("http://", "https://"))


class BaseAlgorithm(ABC):
    """Pure maths on tensors. Subclasses are dataclasses whose fields are the algorithm's options.

    `aggregation` names how token losses are summed, see `rl4llm.data.pack`. Among a batch's token metrics, a
    name that ends in "/max" is reported as the maximum over the policy's tokens; one that ends in "/weighted" is
    summed with the weights of the loss, which makes a mean over trajectories where the loss is one, and loses that
    ending; every other is their mean.

    In the order in which they are called: `keep` chooses groups, `credits` says how good their trajectories are, `observe`
    remembers something of them for the next step, `learners` and `learns_from` choose those that train, `assign` turns
    credits into advantages, `token_losses` and `value_losses` turn these into losses, and `after_step` sees what came of
    it. The trainer checks what `credits` and the losses return.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def aggregation(self) -> str:
        """Return the name of the loss aggregation: an option, or a constant of the method."""

    @classmethod
    def stale_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that fit samples of older weights, where `options`, which the user set, leave them open."""
        return {}

    def needs(self) -> Needs:
        """Return what this algorithm needs with its options."""
        return Needs()

    def privileged_prompts(self, samples: Sequence[SampleState], group: Group) -> list[Prompt | None]:
        """Return the prompt that the reference reads before each trajectory, None for one that it does not read.

        `samples` are what the trajectories were made of. It is called only if `needs().privileged`.
        """
        raise TypeError(f"{type(self).__name__} has no privileged prompts.")

    def keep(self, group: Group) -> bool:
        """Return whether a group trains."""
        return True

    def learns_from(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory of a kept group trains; the others still count in comparisons."""
        return True

    def learners(self, group: Group) -> list[bool]:
        """Return whether each trajectory of a kept group trains; override it if that depends on the others of the group."""
        return [self.learns_from(trajectory) for trajectory in group.trajectories]

    def credits(self, group: Group) -> Tensor:
        """Return how much better than expected each trajectory was (G,), or each of its turns (G, K).

        All numbers must be finite. What stands after the last turn of a trajectory is not read.
        """
        return group.rewards_G

    def batch_credits(self, groups: Sequence[Group], total: Total) -> list[Tensor]:
        """Return the credits of all groups of a step; override it if credits depend on other groups."""
        return [self.credits(group) for group in groups]

    def observe(self, groups: Sequence[Group], everyone: Callable[[Any], list[Any]]) -> None:
        """See the groups of a step that have credits; `everyone(x)` returns the x of all ranks, the same on each of them.

        All ranks call it, even those without a group.
        """

    def assign(self, batches: Sequence[TrainBatch], total: Total) -> None:
        """Fill `advantages_BT` (and `returns_BT`) of all micro-batches of a rollout from `credits_BT`.

        The trainer fills in before what `needs` requires.
        """
        for batch in batches:
            batch.advantages_BT = batch.credits_BT

    @abstractmethod
    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        """Return the loss of each token (B, T), and metrics of the same shape, without any reduction."""

    def value_losses(self, batch: TrainBatch, values_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        """Return the critic's loss of each token (B, T); the trainer calls it only if `needs().critic`."""
        raise TypeError(f"{type(self).__name__} has no critic, so it has no value loss.")

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Receive what an optimizer step measured, for example to adapt a coefficient."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs of this object, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def check(self, group_size: int) -> None:
        """Raise ConfigError for options that their annotations do not accept, or that cannot be combined."""
        if is_dataclass(type(self)):
            check_fields(self, "algorithm")
