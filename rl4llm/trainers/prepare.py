"""From scored groups to optimizer steps: credits, micro-batches, the passes of other models, advantages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rl4llm.algorithms.functional import kl
from rl4llm.core.base_algorithm import BaseAlgorithm, KLEstimator
from rl4llm.core.base_backend import BaseBackend, TokenScorer
from rl4llm.core.registry import load
from rl4llm.core.types import Group, TrainBatch, Trajectory, Update
from rl4llm.data.pack import Batching, Credit, StepTotals, filler, totals_of
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.returned import Credits, checked_credits

NO_CREDIT = 1e-9  # a credit this small is rounding, not a difference between rewards


@dataclass(frozen=True, slots=True)
class Prepared:
    """The optimizer steps of a rollout, the credits of each group's trajectories, and metrics that were measured.

    A credit is a number, or a list with a number for each turn.
    """

    updates: list[Update]
    credits: list[Credits]
    metrics: dict[str, float]


@dataclass(kw_only=True, eq=False)
class Preparation:
    """Serves every algorithm: it reads the needs and fulfils them.

    `policy` is the model that trains; `reference` and `critic` are set if the algorithm needs them.
    """

    algorithm: BaseAlgorithm
    policy: BaseBackend
    batching: Batching
    temperature: float = 1.0
    reference: TokenScorer | None = None
    critic: BaseBackend | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def prepare(self, groups: Sequence[Group], step: int) -> Prepared:
        """Return the optimizer steps after `step` finished steps, from groups that train."""
        needs, metrics = self.algorithm.needs(), {}
        groups = [  # the number in the step separates two draws of the same prompt
            replace(group, trajectories=tuple(replace(one, draw=draw) for one in group.trajectories))
            for draw, group in enumerate(groups)
        ]
        if needs.reward_kl is not None:
            groups, metrics["reward/kl"] = self._with_kl_in_reward(groups, *needs.reward_kl)
        credits = checked_credits(self.algorithm, groups, self.ranks.total)
        self.algorithm.observe(groups, self.ranks.everyone)
        packed = self._packed(groups, credits)
        divergence = self._divergence(groups) if needs.mismatched else None
        batches = [batch for update in packed for batch in update.batches]
        # The forward of the first update gives the log-probs before it.
        later = needs.old_logprobs and needs.old_in_losses and self.batching.passes_per_rollout == 1
        for batch in batches[len(packed[0].batches) if later else 0 :]:
            batch.old_logprobs_BT = (
                self._numbers(self.policy, batch) if needs.old_logprobs else batch.sampled_logprobs_BT
            )
        for batch in batches:
            if needs.old_entropy:
                load("rl4llm.trainers.passes:fill_entropy")(self.policy, batch, self.temperature)
            if needs.reference and not needs.privileged:
                refer = load("rl4llm.trainers.passes:refer")
                refer(self.reference, batch, needs.divergence, self.temperature)
            if needs.critic:
                batch.values_BT = self._numbers(self.critic, batch)
            if divergence is not None:
                batch.divergence = divergence
        unscored = load("rl4llm.trainers.passes:without_unscored") if needs.served else None
        metrics |= unscored(batches, self.reference, self.ranks) if unscored else {}
        self.algorithm.assign(batches, self.ranks.total)
        return Prepared(self._updates(packed, step), credits, metrics)

    def _packed(self, groups: Sequence[Group], credits: Sequence[Credits]) -> list[Update]:
        """Return the micro-batches of each optimizer step, with credits only. The steps share the groups evenly, and every
        rank has equally many steps.

        Steps without a trajectory on any rank are left out. If none remains, the result is one update without batches.
        """
        parts = self.batching.updates_per_rollout
        bounds = [len(groups) * part // parts for part in range(parts + 1)]
        shares = (slice(start, end) for start, end in itertools.pairwise(bounds))
        packed = [self._share(groups[share], credits[share]) for share in shares]
        return [update for update, totals in packed if totals.sequences] or [Update([])]

    def _share(self, groups: Sequence[Group], credits: Sequence[Credits]) -> tuple[Update, StepTotals]:
        """Return the micro-batches of one optimizer step on this rank, and the totals of all ranks."""
        needs = self.algorithm.needs()
        chain = itertools.chain.from_iterable
        members = chain(group.trajectories for group in groups)
        learners = chain(self.algorithm.learners(group) for group in groups)
        trajectories: list[Trajectory] = []
        token_credits: list[Credit] = []
        for trajectory, credit, learns in zip(members, chain(credits), learners, strict=True):
            turns = credit if isinstance(credit, Sequence) else [credit]
            if turns and learns:
                is_needed = needs.every_token or any(abs(turn) > NO_CREDIT for turn in turns)
                trajectories.append(trajectory)
                token_credits.append(credit if is_needed else None)
        counts = torch.tensor(totals_of(trajectories), dtype=torch.float64)
        totals = StepTotals(*map(int, self.ranks.total(counts).tolist()))
        records = [record for trajectory in trajectories for record in trajectory.records]
        batches = self._aligned(self.batching.pack(trajectories, token_credits, totals))
        if needs.privileged:
            fill = load("rl4llm.trainers.privileged:fill_reference")
            fill(batches, trajectories, self._repacked, lambda batch: self._numbers(self.reference, batch))
        if needs.references:
            load("rl4llm.trainers.passes:number_environments")(batches, trajectories, [*needs.references])
        return Update(batches, records), totals

    def _repacked(self, trajectories: Sequence[Trajectory]) -> list[TrainBatch]:
        """Return micro-batches for a pass of a model, without credits."""
        return self._aligned(self.batching.pack(trajectories, [1.0] * len(trajectories)))

    def _aligned(self, batches: list[TrainBatch]) -> list[TrainBatch]:
        """Add empty batches until all ranks have equally many, since sharded models compute together."""
        missing = self.ranks.largest(len(batches)) - len(batches)
        return batches + [filler(self.batching.pad_token_id) for _ in range(missing)]

    def _updates(self, packed: list[Update], step: int) -> list[Update]:
        policy_passes, critic_passes = self.batching.passes_per_rollout, 0
        if (critic := self.algorithm.needs().critic) is not None:
            policy_passes, critic_passes = policy_passes if step >= critic.warmup_steps else 0, critic.passes
        updates = []
        for number in range(max(policy_passes, critic_passes)):
            for update in packed:
                if number < critic_passes and update.batches:
                    updates.append(replace(update, model="critic"))
                if number < policy_passes:
                    updates.append(update)
        return updates

    def _with_kl_in_reward(
        self, groups: list[Group], coefficient: float, estimator: KLEstimator
    ) -> tuple[list[Group], float]:
        """Subtract the KL penalty of each trajectory, summed over its tokens, from its reward; return the mean too."""
        penalties = self._sums(
            [trajectory for group in groups for trajectory in group.trajectories],
            lambda batch: kl(batch.sampled_logprobs_BT, self._numbers(self.reference, batch), estimator),
        )
        penalty = iter((coefficient * penalties).tolist())
        penalised = []
        for group in groups:
            lower = (replace(one, reward=one.reward - next(penalty)) for one in group.trajectories)
            penalised.append(replace(group, trajectories=tuple(lower)))
        return penalised, self._mean(penalties).item()

    def _divergence(self, groups: Sequence[Group]) -> Tensor:
        """Estimate KL(policy || reference), not below 0, on each prompt of the step with an answer to another one.

        Ethayarajh et al. 2024 (KTO), section 4.1. For a step with a single prompt it is 0.
        """
        from rl4llm.trainers.mismatched import mismatched  # noqa: PLC0415 - only KTO needs it

        pairs = mismatched([trajectory for group in groups for trajectory in group.trajectories], self.ranks)
        drifts = self._sums(
            pairs, lambda batch: self._numbers(self.policy, batch) - self._numbers(self.reference, batch)
        )
        return self._mean(drifts).clamp(min=0)

    def _mean(self, numbers: Tensor) -> Tensor:
        """Return the mean over the numbers of all ranks; 0 without any."""
        summed, count = self.ranks.total(torch.stack([numbers.sum(), numbers.new_tensor(len(numbers))]))
        return summed / count.clamp(min=1)

    def _sums(self, trajectories: Sequence[Trajectory], numbers_of: Callable[[TrainBatch], Tensor]) -> Tensor:
        """Sum over each trajectory, in fp64, the numbers (B, T) of its policy tokens in a batch."""
        owners = torch.tensor(
            [i for i, one in enumerate(trajectories) for _ in one.records], dtype=torch.long
        )
        sums = torch.zeros(len(trajectories), dtype=torch.float64)
        for batch in self._repacked(trajectories):
            numbers_BT = numbers_of(batch)
            if batch.record_ids_BT is not None:  # fillers have none
                records_N = batch.record_ids_BT[batch.mask_BT]
                sums.index_add_(0, owners[records_N], numbers_BT[batch.mask_BT].double())
        return sums

    def _numbers(self, model: TokenScorer | None, batch: TrainBatch) -> Tensor:
        assert model is not None  # `needs` says which models there are
        return model.forward(batch, temperature=self.temperature).to(batch.mask_BT.device)
