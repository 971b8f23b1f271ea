"""Reinforcement learning: what the policy samples is what it learns from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl4llm.core.base_backend import BaseBackend, TokenMetrics
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.base_trainer import BaseTrainer, merge
from rl4llm.core.errors import ConfigError, StaleWeightsError, TooManyFailuresError
from rl4llm.core.types import Group, SamplingParams, TokenSpan, TrainBatch, Update, WeightRef
from rl4llm.data.mixture import MixedPrompts
from rl4llm.data.prompts import PromptStream
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout, RolloutResult
from rl4llm.sync.mismatch import check_mismatch, summarize_mismatch, token_mismatch
from rl4llm.sync.verify import Canary
from rl4llm.tracking.run import RunTracker
from rl4llm.tracking.summary import succeeded
from rl4llm.tracking.tokens import TrainedTokens
from rl4llm.trainers.ahead import Ahead, Played
from rl4llm.trainers.give import give_weights, giving_weights
from rl4llm.trainers.prepare import Preparation, Prepared

T = TypeVar("T")


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
        rollout: Rollout | MixedRollout,
        prompts: PromptStream | MixedPrompts,
        plan: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        eval_params: SamplingParams,
        preparation: Preparation,
        tracker: RunTracker,
        evaluation: Rollout | MixedRollout | None = None,
        plays_ahead: bool = False,
        **base: Any,
    ):
        super().__init__(**base)
        self.inference = inference
        self.rollout = rollout
        self.prompts = prompts
        self.plan = plan
        self.sampling_params = sampling_params
        self.eval_params = eval_params
        self.preparation = preparation
        self.tracker = tracker
        self.evaluation = evaluation
        self.plays_ahead = plays_ahead
        self._ahead = Ahead()
        self._cursor: dict[str, Any] = {}  # of the prompts, before those that are played ahead
        self._stale = False  # whether what trains was sampled with older weights
        self._moved = False  # the weights, since the engines got them
        self._credits: dict[int, list[Any]] = {}  # by the id of a group that trained
        self._notes: dict[str, float] = {}
        self._records: Sequence[tuple[TokenSpan, ...]] = ()  # those of the update that runs
        self._trained: TrainedTokens | None = None
        self._closed = False

    @property
    def critic(self) -> BaseBackend | None:
        return self.preparation.critic

    @property
    def _moving_reference(self) -> BaseBackend | None:
        """The reference where it follows the policy, for which it is a model of its own."""
        reference = self.preparation.reference
        return reference if self.algorithm.needs().reference_every and isinstance(reference, BaseBackend) else None

    def collect(self) -> RolloutResult:
        """Play `group_size` episodes for each of the next prompts, and more in place of groups that do not train.

        A prompt is a group for each role that learns.

        Of what is missing over all ranks each plays a share, so that any number of them play the same episodes.
        """
        most, refills = self.algorithm.needs().refills, 0
        with self.clock("rollout"):
            first = self._ahead.take() if self._ahead.under_way else self._round(self.prompts.next_batch())
            collected = first.result
            wanted = self._total(self.rollout.count_groups(first.rows)) if most else 0
            of_prompt = wanted / (self.prompts.batch_size * self.ranks.size)
            while refills < most and (missing := wanted - self._count(collected)[0]) > 0:
                refills += 1
                more = self._round(self.prompts.next_batch(math.ceil(missing / of_prompt)), number=refills).result
                collected = RolloutResult(collected.groups + more.groups, collected.failed + more.failed)
        self._observe(collected)
        if most:
            kept, played = self._count(collected)
            self._notes |= {"groups/refills": refills, "groups/dropped": played - kept}
        self._stale = first.version < self.step
        if self.plays_ahead:
            self._notes["staleness"] = float(self.step - first.version)
            self._play_ahead()
        return collected

    def prepare(self, collected: RolloutResult) -> list[Update]:
        """Credits, packed batches, other models' passes, advantages: for each optimizer step of this rollout."""
        with self.clock("prepare"):
            if not self._ahead.under_way:
                self._lend_device()
            self._refresh_reference()
            kept = [group for group in collected.groups if self._trains(group)]
            prepared = self.preparation.prepare(kept, self.step)
            self._note(kept, prepared)
            self._trained = TrainedTokens() if self.tracker.stores_episodes(self.step + 1) else None
            return prepared.updates

    def update(self, update: Update) -> dict[str, float]:
        """One optimizer step; the first of a rollout also measures how far trainer and engine are apart."""
        metrics = self._update_critic(update) if update.critic else {}
        if update.policy:
            self._records = update.records
            metrics |= summarize_mismatch(super().update(update))
            check_mismatch(metrics, self.inference.stop_above)
            self._moved = self._moved or bool(update.batches)
        self.algorithm.after_step(metrics | self._notes)
        return metrics

    def forward_backward(self, batch: TrainBatch, last: bool = True) -> dict[str, float]:
        return self.backend.forward_backward(
            batch,
            self._noted_losses,
            temperature=self.sampling_params.temperature or 1.0,
            entropy=self.algorithm.needs().entropy,
            last=last,
        )

    def publish(self) -> None:
        canary, client = self.inference.canary, self.inference.client
        if self._ahead.under_way:
            with self.clock("rollout"):
                self._ahead.wait()
        with self.clock("publish"):
            self._lend_device()
        with self.clock("verify"):  # what the trainer says, while it is on its device
            expected_BT = canary.expected(self.backend) if canary else None
        with self.clock("publish"):
            weight_ref = self._hand_over()
        if canary and expected_BT is not None and self._speaks:
            with self.clock("verify"):
                self._run(canary.compare(expected_BT, client, weight_ref))
        self.ranks.wait()
        self._moved = False

    def report(self, collected: RolloutResult, metrics: Sequence[dict[str, float]]) -> None:
        tokens = sum(trajectory.num_tokens for trajectory in collected.trajectories)
        credits = [self._credits.get(id(group), [0.0] * len(group.trajectories)) for group in collected.groups]
        counts = {**self.inference.client.metrics(), **self._notes}
        self.tracker.step(
            self.step,
            collected.groups,
            collected.failed,
            metrics,
            tokens=tokens,
            credits=credits,
            counts=counts,
            trained=self._trained,
        )
        self._trained = None

    def evaluate(self) -> None:
        """Measure on the held-out prompts."""
        if self.evaluation is None:
            return
        with self.clock("evaluate"):
            result = self.play_held_out()
        self.tracker.evaluation(self.step, result.groups, result.failed)

    def play_held_out(self, samples: int = 1) -> RolloutResult:
        """So many episodes for each of this rank's held-out prompts, at the temperature of the evaluation."""
        if self.evaluation is None:
            raise ConfigError("Nothing is held out to play on. Next: set eval.every to 1 or more, and eval.path.")
        rows = range(self.ranks.rank, self.evaluation.num_rows, self.ranks.size)
        return self.evaluation.play(rows, step=self.step, sampling_params=self.eval_params, group_size=samples)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._ahead.close(self.inference.runner):
                self.warn("The episodes of the next step do not end. The engines are left as they are.")
                return
            self._run(self.inference.publisher.close())
            self._run(self.inference.client.close())
            self.inference.runner.close()
            for rollout in (self.rollout, self.evaluation):
                if rollout is not None:
                    rollout.close()
        finally:
            self.tracker.close()

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory; a critic goes into `critic/` in it."""
        exported = {directory: self.backend}
        if self.critic is not None:
            exported[directory / "critic"] = self.critic
        for place, model in exported.items():
            if self.ranks.is_first:
                place.mkdir(exist_ok=True)
                self.rollout.tokenizer.save_pretrained(place)
            model.export(place)

    def models(self) -> dict[str, BaseBackend]:
        changing = {"critic": self.critic, "reference": self._moving_reference}
        return {**super().models(), **{name: model for name, model in changing.items() if model is not None}}

    def state(self) -> dict[str, Any]:
        return {"prompts": self._cursor if self._ahead.under_way else self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])

    def begin(self, step: int) -> None:
        self.tracker.begin(step)
        self.tracker.table([(row["what"], row["value"]) for row in self.plan], title="how a rollout becomes updates")

    def warn(self, text: str) -> None:
        self.tracker.warn(text)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.inference.runner.run(coroutine)

    def _check_versions(self, collected: RolloutResult, version: int) -> None:
        """Every token must come from the weights that were published last, whatever an engine did since."""
        found = {span.version for trajectory in collected.trajectories for span in trajectory.policy_spans}
        if found - {version}:
            raise StaleWeightsError(
                f"{self.inference.client} sampled tokens with versions {sorted(found, key=str)} of the weights, where "
                f"version {version} was published. Training stops; look for a restart or another trainer in the server's "
                "log."
            )

    def _measures_mismatch(self) -> bool:
        """Before the weights move; not where samples were drawn at other temperatures than the one that trains."""
        return not self._moved and not self._stale and not self.algorithm.needs().sampling

    def _noted_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        losses_BT, metrics = self.algorithm.token_losses(batch, logprobs_BT, entropy_BT)
        if self._trained is not None:
            before_BT = batch.old_logprobs_BT if self.algorithm.needs().old_logprobs else logprobs_BT
            self._trained.add(self._records, batch, before_BT, metrics.get("clip_fraction"))
        return losses_BT, metrics | (token_mismatch(batch, logprobs_BT) if self._measures_mismatch() else {})

    @property
    def _speaks(self) -> bool:
        """Whether this rank tells engines about weights: each has its own in its process, of servers the first rank does."""
        return self.ranks.is_first or self.inference.client.in_process

    def _lend_device(self) -> None:
        self.ranks.wait()  # until no other samples any more
        if self._speaks:
            self._run(self.inference.publisher.lend_device(self.backend))
        self.ranks.wait()
        if not self._speaks:
            self.backend.onload()

    def _hand_over(self) -> WeightRef:
        """Have the engines take over the weights as version `step`."""
        publisher = self.inference.publisher
        if self.inference.client.in_process:
            return self._run(publisher.publish(self.backend, self.step))
        if self.ranks.is_first:
            with giving_weights(self.backend, self.ranks) as backend:
                weight_ref = self._run(publisher.publish(backend, self.step))
            self.ranks.share(replace(weight_ref, tensors=None, held=True))
            return weight_ref
        give_weights(self.backend, self.ranks)
        publisher.follow(self.backend)
        weight_ref = self.ranks.share(None)
        self._run(self.inference.client.load(weight_ref))
        return weight_ref

    def _round(self, rows: list[int], number: int = 0) -> Played:
        """Episodes of some prompts for this step, with the weights of now, which are those of `step`."""
        return self._play(rows, number, self.step, self.prompts.earlier, version=self.step)

    def _play_ahead(self) -> None:
        """Begin the episodes of the next step, which are played while this one trains.

        Not those behind a checkpoint: a run that goes on from it has no other weights than the newest.
        """
        following = self.step + 1
        if self.schedule.saves_after(following):
            return
        self._cursor = self.prompts.state()
        rows = self.prompts.next_batch()
        self._ahead.start(partial(self._play, rows, 0, following, self.prompts.earlier, version=self.step))

    def _play(self, rows: list[int], number: int, step: int, earlier: Mapping[int, int], version: int) -> Played:
        needs = self.algorithm.needs()
        try:
            result = self.rollout.play(
                rows,
                step=step,
                sampling_params=self.sampling_params,
                first_index=number * (self.rollout.group_size + 1),
                sampling=needs.sampling,
                greedy_baseline=needs.greedy_baseline,
                earlier=earlier,
            )
        except TooManyFailuresError as error:
            self.tracker.stopped_by(step + 1, error.failed)
            raise
        self._check_versions(result, version)
        return Played(rows, result, version)

    def _count(self, collected: RolloutResult) -> tuple[int, int]:
        """How many groups train, of how many that are not frozen, on all ranks."""
        kept = sum(self._trains(group) for group in collected.groups)
        played = sum(not group.frozen for group in collected.groups)
        return self._total(kept), self._total(played)

    def _total(self, number: int) -> int:
        """The sum over all ranks."""
        return int(self.ranks.total(torch.tensor(number)))

    def _observe(self, collected: RolloutResult) -> None:
        """Tell the prompts how many episodes of each part succeeded, where what comes next depends on it."""
        if not self.prompts.watched:
            return
        members = [member for group in collected.groups if not group.frozen for member in group.trajectories]
        own = [[member for member in members if member.part == part] for part in self.prompts.watched]
        counts = torch.tensor([[sum(succeeded(member.rewards) for member in part), len(part)] for part in own])
        self.prompts.observe(dict(zip(self.prompts.watched, self.ranks.total(counts).tolist(), strict=True)))
        self._notes |= self.prompts.metrics()

    def _trains(self, group: Group) -> bool:
        return not group.frozen and self.algorithm.keep(group)

    def _note(self, kept: Sequence[Group], prepared: Prepared) -> None:
        """Remember what `report` will tell."""
        self._notes |= prepared.metrics
        self._credits = {id(group): _plain(credits) for group, (_, credits) in zip(kept, prepared.scored, strict=True)}

    def _refresh_reference(self) -> None:
        reference = self._moving_reference
        if reference and self.step and self.step % self.algorithm.needs().reference_every == 0:
            reference.take_weights(self.backend.weights())

    def _update_critic(self, update: Update) -> dict[str, float]:
        critic = self.critic
        if critic is None or not update.batches:
            return {}
        with self.clock("critic"):
            parts = [
                critic.forward_backward(batch, self._value_losses, last=number == len(update.batches))
                for number, batch in enumerate(update.batches, 1)
            ]
            metrics = self.ranks.merge(merge(parts)) | critic.optim_step()
            self.watch(update, metrics, "critic")
        return {f"critic/{name.removeprefix('update/')}": value for name, value in metrics.items()}

    def _value_losses(self, batch: TrainBatch, values_BT: Tensor, _: Tensor | None) -> tuple[Tensor, TokenMetrics]:
        return self.algorithm.value_losses(batch, values_BT)


def _plain(credits: Tensor) -> list[Any]:
    """Numbers, or lists of one number for each turn there was; nothing for what took no part."""
    if credits.dim() == 1:
        return [None if math.isnan(credit) else credit for credit in credits.tolist()]
    return [turns_K[~turns_K.isnan()].tolist() for turns_K in credits]
