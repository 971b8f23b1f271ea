"""From scored groups to optimizer steps: credits, micro-batches, the passes of other models, advantages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from rl4llm.algorithms.functional import kl
from rl4llm.core.base_algorithm import BaseAlgorithm, Total
from rl4llm.core.base_backend import BaseBackend, TokenScorer
from rl4llm.core.ranks import Ranks
from rl4llm.core.types import Group, GroupKey, TokenSpan, TrainBatch, Trajectory, Update
from rl4llm.data.pack import Credit, StepTotals, check_aggregation, pack, totals_of

T = TypeVar("T")
Scored = tuple[Group, Tensor]
"""A group and the credits of its trajectories (G,) or of their turns (G, K)."""
NO_CREDIT = 1e-9  # a credit this small is rounding, not a difference between rewards


@dataclass(frozen=True, slots=True)
class Batching:
    """How trajectories become micro-batches and optimizer steps.

    Without `max_tokens_per_batch`, micro-batches have the usual size of the device. What is longer and cannot be cut, a
    trajectory or with `whole_groups` a group, gets one that fits it.
    `constant_length` is the divisor of the aggregation "constant", in tokens.
    """

    layout: str
    aggregation: str
    pad_token_id: int
    max_tokens_per_batch: int | None
    usual_tokens_per_batch: int
    updates_per_rollout: int = 1
    epochs: int = 1
    constant_length: int = 0
    whole_groups: bool = False

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)

    def totals(self, trajectories: Sequence[Trajectory]) -> StepTotals:
        """What an optimizer step trains on, counted before anything is left out."""
        return totals_of(trajectories, constant_length=self.constant_length)

    def budget(self, lengths: Sequence[int]) -> int:
        """Tokens of a micro-batch, for pieces of these lengths that cannot be cut."""
        return max(self.max_tokens_per_batch or self.usual_tokens_per_batch, *lengths)

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """What each optimizer step trains on: shares of the items, as even as they come; as many on every rank."""
        parts = self.updates_per_rollout
        bounds = [len(items) * part // parts for part in range(parts + 1)]
        return [items[start:end] for start, end in itertools.pairwise(bounds)]

    def pack(self, trajectories: Sequence[Trajectory], credits: Sequence[Credit], totals: StepTotals) -> list[TrainBatch]:
        """The micro-batches of one optimizer step."""
        return pack(
            trajectories,
            credits,
            max_tokens_per_batch=self.budget([0, *self._pieces(trajectories)]),
            layout=self.layout,
            aggregation=self.aggregation,
            totals=totals,
            pad_token_id=self.pad_token_id,
            whole_groups=self.whole_groups,
        )

    def _pieces(self, trajectories: Sequence[Trajectory]) -> list[int]:
        if not self.whole_groups:
            return [record.num_tokens for trajectory in trajectories for record in trajectory.by_record()]
        sizes: dict[GroupKey, int] = {}
        for trajectory in trajectories:
            sizes[trajectory.group_key] = sizes.get(trajectory.group_key, 0) + trajectory.num_tokens
        return list(sizes.values())


@dataclass(frozen=True, slots=True)
class Prepared:
    """The optimizer steps of a rollout; for each group the credits it was given; and what was measured on the way."""

    updates: list[Update]
    scored: list[Scored]
    metrics: dict[str, float]


class Preparation:
    """Serves every algorithm: it asks for needs and fills them in.

    `policy` is the model that trains; `reference` and `critic` are there when the algorithm needs them.
    """

    def __init__(
        self,
        *,
        algorithm: BaseAlgorithm,
        policy: BaseBackend,
        batching: Batching,
        temperature: float = 1.0,
        reference: TokenScorer | None = None,
        critic: BaseBackend | None = None,
        ranks: Ranks | None = None,
    ):
        self.algorithm = algorithm
        self.policy = policy
        self.batching = batching
        self.temperature = temperature
        self.reference = reference
        self.critic = critic
        self.ranks = ranks or Ranks()
        self.total: Total = self.ranks.total

    def prepare(self, groups: Sequence[Group], step: int) -> Prepared:
        """The optimizer steps after `step` finished ones, from groups that train."""
        metrics: dict[str, float] = {}
        penalised = self._with_kl_in_reward(list(groups), metrics)
        scored = list(zip(penalised, self.algorithm.batch_credits(penalised, self.total), strict=True))
        packed = self._packed(scored)
        batches = [batch for update in packed for batch in update.batches]
        divergence = self._divergence(penalised) if self.algorithm.needs().mismatched else None
        for batch in batches:
            self._fill(batch)
            if divergence is not None:
                batch.divergence = divergence
        self.algorithm.assign(batches, self.total)
        return Prepared(self._updates(packed, step), scored, metrics)

    def _packed(self, scored: Sequence[Scored]) -> list[Update]:
        """The micro-batches of each optimizer step, on which nothing is known yet but credits.

        Steps for which no rank has a trajectory are left out, but for one that says so.
        """
        found = [self._share(share) for share in self.batching.shares(scored)]
        return [update for update, totals in found if totals.sequences] or [Update([])]

    def _share(self, share: Sequence[Scored]) -> tuple[Update, StepTotals]:
        """The micro-batches of one optimizer step on this rank, and the totals of all."""
        trajectories, credits = [], []
        for group, credits_G in share:
            for trajectory, credit in zip(group.trajectories, credits_G.tolist(), strict=True):
                turns = [turn for turn in (credit if credits_G.dim() > 1 else [credit]) if not math.isnan(turn)]
                if self.algorithm.learns_from(trajectory) and turns:
                    trajectories.append(trajectory)
                    credits.append(self._credit(turns, by_turn=credits_G.dim() > 1))
        totals = self._over_ranks(self.batching.totals(trajectories))
        batches = self._aligned(self.batching.pack(trajectories, credits, totals))
        return Update(batches, records=[record for trajectory in trajectories for record in trajectory.records]), totals

    def _aligned(self, batches: list[TrainBatch]) -> list[TrainBatch]:
        """As many as the rank with the most has, since sharded models compute together; those added teach nothing."""
        missing = self.ranks.largest(len(batches)) - len(batches)
        return batches + [filler(self.batching.pad_token_id) for _ in range(missing)]

    def _over_ranks(self, own: StepTotals) -> StepTotals:
        counts = self.total(torch.tensor([own.tokens, own.sequences, own.prompts], dtype=torch.float64))
        tokens, sequences, prompts = map(int, counts.tolist())
        return replace(own, tokens=tokens, sequences=sequences, prompts=prompts)

    def _credit(self, turns: list[float], by_turn: bool) -> Credit:
        """As `pack` takes it: nothing, where there is nothing to learn; else one for each turn there was, or one number."""
        if not self.algorithm.needs().every_token and all(abs(turn) <= NO_CREDIT for turn in turns):
            return None
        return turns if by_turn else turns[0]

    def _fill(self, batch: TrainBatch) -> None:
        """What the algorithm needs to know of each token from other passes."""
        needs = self.algorithm.needs()
        batch.old_logprobs_BT = self._numbers(self.policy, batch) if needs.old_logprobs else batch.sampled_logprobs_BT
        if needs.reference:
            batch.ref_logprobs_BT = self._numbers(self.reference, batch)
        if needs.critic:
            batch.values_BT = self._numbers(self.critic, batch)

    def _updates(self, packed: list[Update], step: int) -> list[Update]:
        critic = self.algorithm.needs().critic
        if critic is None:
            return packed * self.batching.epochs
        epochs = self.batching.epochs if step >= critic.warmup_steps else 0
        return [
            replace(update, policy=epoch < epochs, critic=epoch < critic.epochs)
            for epoch in range(max(epochs, critic.epochs))
            for update in packed
        ]

    def _with_kl_in_reward(self, groups: list[Group], metrics: dict[str, float]) -> list[Group]:
        """Take the KL penalty of each trajectory, summed over its tokens, off its reward, when the algorithm asks for it."""
        penalty = self.algorithm.needs().reward_kl
        if penalty is None:
            return groups
        coefficient, estimator = penalty
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        penalties = torch.zeros(len(trajectories), dtype=torch.float64)
        for batch, owners_BT in self._owned(trajectories):
            kl_BT = kl(batch.sampled_logprobs_BT, self._numbers(self.reference, batch), estimator)
            penalties.index_add_(0, owners_BT[batch.mask_BT], kl_BT[batch.mask_BT].double())
        count = torch.tensor(float(len(penalties)), dtype=torch.float64)
        summed, count = self.total(torch.stack([penalties.sum(), count])).tolist()
        metrics["reward/kl"] = summed / max(count, 1)
        left = iter((coefficient * penalties).tolist())

        def penalised(group: Group) -> Group:
            return replace(group, trajectories=tuple(replace(t, reward=t.reward - next(left)) for t in group.trajectories))

        return [penalised(group) for group in groups]

    def _divergence(self, groups: Sequence[Group]) -> Tensor:
        """KL(policy || reference), not below 0, estimated on each prompt with the answer to the next one.

        Ethayarajh et al. 2024 (KTO), section 4.1.
        """
        members = [trajectory for group in groups for trajectory in group.trajectories]
        members.sort(key=lambda member: member.group_key)  # the estimate does not depend on the order of a batch
        mismatched = [
            replace(one, prompt_id=f"{number}", spans=(one.spans[0], _first_policy_span(other)))
            for number, (one, other) in enumerate(zip(members, members[1:] + members[:1], strict=True))
        ]
        drifts = torch.zeros(len(mismatched), dtype=torch.float64)
        for batch, owners_BT in self._owned(mismatched):
            drift_BT = self._numbers(self.policy, batch) - self._numbers(self.reference, batch)
            drifts.index_add_(0, owners_BT[batch.mask_BT], drift_BT[batch.mask_BT].double())
        summed, count = self.total(torch.stack([drifts.sum(), drifts.new_tensor(len(drifts))]))
        return (summed / count.clamp(min=1)).clamp(min=0)

    def _owned(self, trajectories: Sequence[Trajectory]) -> list[tuple[TrainBatch, Tensor]]:
        """Batches of all trajectories, and of each token whose it is."""
        # A credit stands on each of its trajectory's tokens, so the index as a credit says whose token it is.
        owners = [float(i) for i in range(len(trajectories))]
        batches = self._aligned(self.batching.pack(trajectories, owners, self.batching.totals(trajectories)))
        return [(batch, batch.credits_BT.long()) for batch in batches]

    def _numbers(self, model: TokenScorer | None, batch: TrainBatch) -> Tensor:
        assert model is not None  # `needs` says which models there are
        return model.forward(batch, temperature=self.temperature).to(batch.mask_BT.device)


def filler(pad_token_id: int) -> TrainBatch:
    """A micro-batch of two tokens, neither of which the policy wrote."""
    ids_BT, zeros_BT = torch.full((1, 2), pad_token_id), torch.zeros(1, 2)
    return TrainBatch(
        token_ids_BT=ids_BT,
        position_ids_BT=torch.arange(2)[None],
        segment_ids_BT=torch.ones_like(ids_BT),
        mask_BT=torch.zeros(1, 2, dtype=torch.bool),
        sampled_logprobs_BT=zeros_BT,
        credits_BT=zeros_BT.clone(),
        weights_BT=zeros_BT.clone(),
        group_ids_BT=ids_BT.clone().fill_(-1),
    )


def _first_policy_span(trajectory: Trajectory) -> TokenSpan:
    return trajectory.policy_spans[0]
