"""Reinforcement learning: what the policy samples is what it learns from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl4llm.algorithms.functional import kl
from rl4llm.core.base_backend import BaseBackend, TokenMetrics
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.base_trainer import BaseTrainer
from rl4llm.core.errors import StaleWeightsError
from rl4llm.core.types import Group, SamplingParams, TrainBatch, Trajectory
from rl4llm.data.pack import StepTotals, check_aggregation, pack, totals_of
from rl4llm.data.prompts import PromptStream
from rl4llm.envs.rollout import Rollout, RolloutResult
from rl4llm.sync.mismatch import check_mismatch, summarize_mismatch, token_mismatch
from rl4llm.sync.verify import Canary
from rl4llm.tracking.run import RunTracker

T = TypeVar("T")
NO_CREDIT = 1e-9  # a credit this small is rounding, not a difference between rewards


@dataclass(frozen=True, slots=True)
class Batching:
    """How trajectories become micro-batches and optimizer steps.

    Without `max_tokens_per_batch`, micro-batches have the usual size of the device. A longer trajectory gets one that fits
    it, since it cannot be cut.
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

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)

    def totals(self, trajectories: Sequence[Trajectory]) -> StepTotals:
        """What an optimizer step trains on, counted before anything is left out."""
        return totals_of(trajectories, constant_length=self.constant_length)

    def budget(self, lengths: Sequence[int]) -> int:
        """Tokens of a micro-batch, for trajectories of these lengths."""
        return max(self.max_tokens_per_batch or self.usual_tokens_per_batch, *lengths)

    def updates(self, items: Sequence[T]) -> list[Sequence[T]]:
        """What each optimizer step trains on: shares of the items, as even as they come, once for each epoch."""
        parts = self.updates_per_rollout
        bounds = [len(items) * part // parts for part in range(parts + 1)]
        shares = [items[start:end] for start, end in itertools.pairwise(bounds)]
        return [share for share in shares if share] * self.epochs

    def pack(
        self, trajectories: Sequence[Trajectory], credits: Sequence[float], totals: StepTotals
    ) -> list[TrainBatch]:
        """The micro-batches of one optimizer step."""
        return pack(
            trajectories,
            credits,
            max_tokens_per_batch=self.budget([0, *(trajectory.num_tokens for trajectory in trajectories)]),
            layout=self.layout,
            aggregation=self.aggregation,
            totals=totals,
            pad_token_id=self.pad_token_id,
        )


@dataclass(frozen=True, slots=True)
class Inference:
    """The inference side: the engine, its event loop, and how weights reach it and prove it.

    `stop_above` is the mean difference between its log-probs and the trainer's, in nats, beyond which training stops.
    """

    client: BaseClient
    runner: asyncio.Runner
    publisher: BasePublisher
    canary: Canary | None
    stop_above: float | None = None


class RLTrainer(BaseTrainer[RolloutResult]):
    """Prompts to episodes to credits to token losses; serves every algorithm that samples for itself."""

    def __init__(
        self,
        *,
        inference: Inference,
        rollout: Rollout,
        prompts: PromptStream,
        plan: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        eval_params: SamplingParams,
        batching: Batching,
        tracker: RunTracker,
        evaluation: Rollout | None = None,
        reference: BaseBackend | None = None,
        **base: Any,
    ):
        super().__init__(**base)
        self.inference = inference
        self.rollout = rollout
        self.prompts = prompts
        self.plan = plan
        self.sampling_params = sampling_params
        self.eval_params = eval_params
        self.batching = batching
        self.tracker = tracker
        self.evaluation = evaluation
        self.reference = reference
        self._moved = False  # the weights, since the engines got them
        self._trained: dict[int, Group] = {}  # by the id of the group that was sampled: what trained, KL in its rewards
        self._notes: dict[str, float] = {}
        self._closed = False

    def collect(self) -> RolloutResult:
        """Play `group_size` episodes for each of the next prompts."""
        with self.clock("rollout"):
            rows = self.prompts.next_batch()
            collected = self.rollout.play(rows, step=self.step, sampling_params=self.sampling_params)
        self._check_versions(collected)
        return collected

    def prepare(self, collected: RolloutResult) -> list[list[TrainBatch]]:
        """Credits, packed batches, reference pass, advantages: for each optimizer step of this rollout."""
        with self.clock("prepare"):
            self._run(self.inference.publisher.lend_device(self.backend))
            groups = [group for group in collected.groups if self.algorithm.keep(group)]
            penalised = self._with_kl_in_reward(groups)
            self._trained = {id(group): changed for group, changed in zip(groups, penalised, strict=True)}
            return [self._batches(share) for share in self.batching.updates(penalised)]

    def update(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """One optimizer step; the first of a rollout also measures how far trainer and engine are apart."""
        metrics = summarize_mismatch(super().update(batches))
        check_mismatch(metrics, self.inference.stop_above)
        self._moved = self._moved or bool(batches)
        return metrics

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        return self.backend.forward_backward(
            batch,
            self.algorithm.token_losses if self._moved else self._measured_losses,
            temperature=self.sampling_params.temperature or 1.0,
            entropy=self.algorithm.needs().entropy,
        )

    def publish(self) -> None:
        publisher, canary, client = self.inference.publisher, self.inference.canary, self.inference.client
        with self.clock("publish"):
            self._run(publisher.lend_device(self.backend))
        with self.clock("verify"):  # what the trainer says, while it is on its device
            expected_BT = canary.expected(self.backend) if canary else None
        with self.clock("publish"):
            weight_ref = self._run(publisher.publish(self.backend, self.step))
        if canary:
            with self.clock("verify"):
                self._run(canary.compare(expected_BT, client, weight_ref))
        self._moved = False

    def report(self, collected: RolloutResult, metrics: Sequence[dict[str, float]]) -> None:
        tokens = sum(trajectory.num_tokens for trajectory in collected.trajectories)
        trained = [self._trained.get(id(group), group) for group in collected.groups]
        credits = [self.algorithm.credits(group).tolist() for group in trained]
        counts = {**self.inference.client.metrics(), **self._notes}
        self.tracker.step(
            self.step, collected.groups, collected.failed, metrics, tokens=tokens, credits=credits, counts=counts
        )

    def evaluate(self) -> None:
        """Measure on the held-out prompts."""
        if self.evaluation is None:
            return
        with self.clock("evaluate"):
            result = self.play_held_out()
        self.tracker.evaluation(self.step, result.groups, result.failed)

    def play_held_out(self) -> RolloutResult:
        """One episode for each held-out prompt, at the temperature of the evaluation."""
        rows = range(len(self.evaluation.env.dataset))
        return self.evaluation.play(rows, step=self.step, sampling_params=self.eval_params, group_size=1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._run(self.inference.publisher.close())
            self._run(self.inference.client.close())
            self.inference.runner.close()
            for rollout in filter(None, (self.rollout, self.evaluation)):
                rollout.env.close()
        finally:
            self.tracker.close()

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        self.backend.export(directory)
        self.rollout.env.tokenizer.save_pretrained(directory)

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])

    def begin(self, step: int) -> None:
        self.tracker.begin(step)
        self.tracker.table([(row["what"], row["value"]) for row in self.plan], title="how a rollout becomes updates")

    def warn(self, text: str) -> None:
        self.tracker.warn(text)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.inference.runner.run(coroutine)

    def _check_versions(self, collected: RolloutResult) -> None:
        """Every token must come from the weights that were published last, whatever an engine did since."""
        found = {span.version for trajectory in collected.trajectories for span in trajectory.policy_spans}
        if found - {self.step}:
            raise StaleWeightsError(
                f"{self.inference.client} sampled tokens with versions {sorted(found)} of the weights, where version "
                f"{self.step} was published. Training stops; look for a restart or another trainer in the server's log."
            )

    def _measured_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        losses_BT, metrics = self.algorithm.token_losses(batch, logprobs_BT, entropy_BT)
        return losses_BT, {**metrics, **token_mismatch(batch, logprobs_BT)}

    def _batches(self, groups: Sequence[Group]) -> list[TrainBatch]:
        credits = torch.cat([self.algorithm.credits(group) for group in groups]).tolist()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        totals = self.batching.totals(trajectories)
        if not self.algorithm.needs().every_token:  # what has no credit has no loss; it still counts in the totals
            taught = [i for i, credit in enumerate(credits) if abs(credit) > NO_CREDIT]
            trajectories, credits = [trajectories[i] for i in taught], [credits[i] for i in taught]
        batches = self.batching.pack(trajectories, credits, totals)
        for batch in batches:
            batch.old_logprobs_BT = batch.sampled_logprobs_BT
            if self.algorithm.needs().reference:
                batch.ref_logprobs_BT = self._reference_logprobs(batch)
            self.algorithm.assign(batch)
        return batches

    def _with_kl_in_reward(self, groups: list[Group]) -> list[Group]:
        """Take the KL penalty of each trajectory, summed over its tokens, off its reward, when the algorithm asks for it."""
        if self.algorithm.needs().reward_kl is None or not groups:
            return groups
        coefficient, estimator = self.algorithm.needs().reward_kl
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        penalties = torch.zeros(len(trajectories))
        # A credit stands on each of its trajectory's tokens, so the index as a credit says whose token it is.
        owners = [float(i) for i in range(len(trajectories))]
        for batch in self.batching.pack(trajectories, owners, self.batching.totals(trajectories)):
            kl_BT = kl(batch.sampled_logprobs_BT, self._reference_logprobs(batch).cpu(), estimator)
            penalties.index_add_(0, batch.credits_BT[batch.mask_BT].long(), kl_BT[batch.mask_BT])
        self._notes["reward/kl"] = penalties.mean().item()
        left = iter((coefficient * penalties).tolist())

        def penalised(group: Group) -> Group:
            return replace(group, trajectories=tuple(replace(t, reward=t.reward - next(left)) for t in group.trajectories))

        return [penalised(group) for group in groups]

    def _reference_logprobs(self, batch: TrainBatch) -> Tensor:
        return self.reference.forward(batch, temperature=self.sampling_params.temperature or 1.0)
