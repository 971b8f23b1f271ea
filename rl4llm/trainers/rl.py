"""Reinforcement learning: the policy learns from what it samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl4llm.backends.source_form import save_tokenizer
from rl4llm.core.base_backend import BaseBackend, TokenMetrics
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, StaleWeightsError, TooManyFailuresError
from rl4llm.core.registry import load
from rl4llm.core.types import Group, SamplingParams, TrainBatch, Update
from rl4llm.data.prompts import PromptStream
from rl4llm.envs.rollout import Rollout, RolloutResult
from rl4llm.envs.stream import GroupStream, Staleness
from rl4llm.runtime.returned import checked_losses
from rl4llm.sync.inference import Inference
from rl4llm.sync.verify import (
    check_mismatch,
    mismatch_warning,
    sampled_by,
    summarize_mismatch,
    token_mismatch,
)
from rl4llm.tracking.episodes import TrainedTokens
from rl4llm.trainers.base_trainer import BaseTrainer, Step
from rl4llm.trainers.prepare import Preparation

if TYPE_CHECKING:
    from rl4llm.data.mixture import MixedPrompts
    from rl4llm.envs.mixture import MixedRollout


@dataclass(slots=True)
class RLStep(Step):
    """The record of one step of reinforcement learning.

    `groups` were sampled from the prompts in `rows`; `failed` samples are in none of them. `moved` is whether the policy
    has changed in this step, and `counts` are metrics. For the log of episodes, `credits` holds those of each group, and
    `trained` what the trainer computed for each token.
    """

    rows: Sequence[int] = ()
    failed: list[SampleState] = field(default_factory=list)
    moved: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    credits: list[Sequence[Any]] = field(default_factory=list)
    trained: TrainedTokens | None = None


class RLTrainer(BaseTrainer[RLStep]):
    """Turns prompts into episodes, credits and token losses; serves every algorithm that samples."""

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
        evaluation: Rollout | MixedRollout | None = None,
        staleness: Staleness | None = None,
        **base: Any,
    ):
        super().__init__(**base)
        self.inference = replace(inference, ranks=self.ranks)
        self.rollout = rollout
        self.prompts = prompts
        self.plan = plan
        self.sampling_params = sampling_params
        self.eval_params = eval_params
        self.preparation = preparation
        self.evaluation = evaluation
        self.staleness = staleness or Staleness()
        self.mixes_versions = self.staleness.limit > 0  # in the samples of a step
        self.stream = GroupStream(rollout, prompts, inference.runner, self._sampled_as)
        self._warned = False  # of a mismatch, once per start
        self._closed = False

    def collect(self) -> RLStep:
        """Play `group_size` episodes for each of the next prompts; dynamic sampling replaces groups that do not train.

        A prompt is a group for each role that learns. Each rank plays a share of the missing groups, so that any number
        of ranks plays the same episodes.
        """
        most, refills = self.algorithm.needs().refills, 0
        share = self.prompts.batch_size * self.ranks.size
        with self.clock("rollout"):
            while (missing := share * self._steps_ahead() - self.stream.left) > 0:
                self.stream.admit(min(missing, share))
            step = self._take(share)
            target = self._total(self.rollout.count_groups(step.rows)) if most else 0
            while refills < most and (missing := target - self._count(step)[0]) > 0:
                refills += 1
                refill = self._take(math.ceil(missing * share / target))
                step.groups += refill.groups
                step.failed += refill.failed
        self._observe(step)
        if most:
            trained, played = self._count(step)
            step.counts |= {"groups/refills": refills, "groups/dropped": played - trained}
        if self.staleness.limit:
            step.counts |= self._staleness(step)
        return step

    def prepare(self, step: RLStep) -> list[Update]:
        """Return the optimizer steps of this rollout: credits, packed batches, passes of other models, advantages."""
        with self.clock("prepare"):
            self.inference.lend_device(self.backend)
            reference, needs = self._moving_reference, self.algorithm.needs()
            if reference and self.step and self.step % needs.reference_every == 0:
                reference.take_weights(self.backend.own_weights(), needs.reference_rate)
            trains = [self._trains(group) for group in step.groups]
            prepared = self.preparation.prepare(list(compress(step.groups, trains)), self.step)
            credits = iter(prepared.credits)
            step.credits = [
                next(credits) if trained else [0.0] * len(group.trajectories)
                for group, trained in zip(step.groups, trains, strict=True)
            ]
            step.counts |= prepared.metrics
            if self.tracker.stores_episodes(self.step + 1):
                step.trained = TrainedTokens()
            return prepared.updates

    def objective(self, update: Update, step: RLStep | None = None) -> dict[str, Any]:
        if update.model == "critic":
            return {"token_losses": checked_losses(self.algorithm, critic=True)}
        objective = super().objective(update) | {"temperature": self.preparation.temperature}
        if divergence := self.algorithm.needs().divergence:
            objective["head"] = load("rl4llm.trainers.passes:head_of")(divergence, self.preparation.reference)
        return objective if step is None else objective | {"measures": partial(self._measures, update, step)}

    def after_update(self, update: Update, step: RLStep, metrics: dict[str, float]) -> dict[str, float]:
        if update.model == "critic":
            metrics = {f"critic/{name.removeprefix('update/')}": value for name, value in metrics.items()}
        else:
            metrics = summarize_mismatch(metrics)
            canary = self.inference.canary
            old_only = self.mixes_versions and not step.moved
            check_mismatch(metrics, self.inference.stop_above, canary.apart if canary and old_only else None)
            if canary and not self._warned and (warning := mismatch_warning(metrics, canary.bound)):
                self._warned = True
                self.warn(f"Step {self.step + 1}: {warning}")
            if not step.moved and "clip_fraction" in metrics:
                metrics["clip_fraction/first"] = metrics["clip_fraction"]
            step.moved = step.moved or bool(update.batches)
        self.algorithm.after_step(metrics | step.counts)
        return metrics

    def publish(self) -> None:
        if self.staleness.repeatable:
            with self.clock("rollout"):
                self.stream.drain()
        self.inference.publish(self.backend, self.step, self.clock)

    def report(self, step: RLStep) -> None:
        self.tracker.step(
            self.step,
            step.groups,
            step.failed,
            step.metrics,
            tokens=sum(trajectory.num_tokens for trajectory in step.trajectories),
            credits=step.credits,
            counts={**self.inference.metrics(), **step.counts},
            trained=step.trained,
        )

    def evaluate(self) -> None:
        """Evaluate on the held-out prompts."""
        if self.evaluation is None:
            return
        with self.clock("evaluate"):
            result = self.play_held_out()
        self.tracker.evaluation(self.step, result.groups, result.failed)

    def play_held_out(self, samples: int = 1) -> RolloutResult:
        """Play `samples` episodes for each of this rank's held-out prompts, at the temperature of the evaluation."""
        if self.evaluation is None:
            raise ConfigError(
                "There are no held-out prompts. Next: set eval.every to 1 or more, and eval.path."
            )
        rows = range(self.ranks.rank, self.evaluation.num_rows, self.ranks.size)
        return self.evaluation.play(
            rows, step=self.step, sampling_params=self.eval_params, group_size=samples
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self.stream.close():
                self.warn("Timed out waiting for in-flight rollouts; leaving the engines running.")
                return
            self.inference.close()
            for rollout in (self.rollout, self.evaluation):
                if rollout is not None:
                    rollout.close()
        finally:
            super().close()

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self.rollout.tokenizer

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory; a critic goes into `critic/` in it."""
        exported = {directory: self.backend}
        if self.critic is not None:
            exported[directory / "critic"] = self.critic
        for place, model in exported.items():
            if self.ranks.is_first:
                place.mkdir(exist_ok=True)
                save_tokenizer(self.tokenizer, place)
            model.export(place)

    def models(self) -> dict[str, BaseBackend]:
        changing = {"critic": self.critic, "reference": self._moving_reference}
        return super().models() | {name: model for name, model in changing.items() if model is not None}

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.stream.restore(state)

    def write_checkpoint(self, directory: Path) -> dict[str, str]:
        if self.stream.left:
            from rl4llm.envs.stored import write_played  # noqa: PLC0415 - synchronous runs never need it

            write_played(directory / f"played-{self.ranks.rank}.jsonl", self.stream.rounds)
        return super().write_checkpoint(directory)

    def restore_files(self, directory: Path) -> None:
        if self.stream.left:
            from rl4llm.envs.stored import read_played  # noqa: PLC0415 - synchronous runs never need it

            share, oldest = self.prompts.batch_size * self.ranks.size, self.step - self.staleness.limit
            files = list(directory.glob("played-*.jsonl"))
            if len(files) == self.ranks.size:  # as many ranks as before play the same draws each
                files = [directory / f"played-{self.ranks.rank}.jsonl"]
            self.stream.kept = read_played(files, self.stream.rounds, share, oldest)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.tracker.table(
            [(row["what"], row["value"]) for row in self.plan], title="how a rollout becomes updates"
        )
        if begun := self.stream.left:
            played = self._total(self.stream.kept)
            self.tracker.note(
                f"{played} prompts have been played; {begun - played} are played again, from their seeds"
            )

    @property
    def critic(self) -> BaseBackend | None:
        return self.preparation.critic

    @property
    def _moving_reference(self) -> BaseBackend | None:
        """Return the reference if it follows the policy, which requires a separate model."""
        reference = self.preparation.reference
        if self.algorithm.needs().reference_every and isinstance(reference, BaseBackend):
            return reference
        return None

    def _sampled_as(self) -> dict[str, Any]:
        """Return how episodes are sampled, as `Rollout.begin` takes it."""
        needs = self.algorithm.needs()
        return {
            "sampling_params": self.sampling_params,
            "sampling": needs.sampling,
            "greedy_baseline": needs.greedy_baseline,
        }

    def _steps_ahead(self) -> int:
        """Return for how many steps, this one included, episodes may have begun, so that no token becomes too old."""
        most = min(self.staleness.limit + 1, self.schedule.max_steps - self.step)
        saves = (count for count in range(1, most) if self.schedule.saves_after(self.step + count))
        return next(saves, most) if self.staleness.repeatable else most

    def _take(self, total: int) -> RLStep:
        rows, units = self.stream.take(total)
        try:
            result = self.rollout.finish(units)
        except TooManyFailuresError as error:
            self.tracker.stopped_by(self.step + 1, error.failed)
            raise
        # Every token must come from weights that were published, and not from too old ones, whatever an engine did since.
        versions = {span.version for trajectory in result.trajectories for span in trajectory.policy_spans}
        oldest = max(0, self.step - self.staleness.limit)
        if not versions.issubset(range(oldest, self.step + 1)):
            raise StaleWeightsError(
                f"{self.inference.client} sampled tokens with versions {sorted(versions, key=str)} of the weights, but "
                f"version {self.step} was published and rollout.max_staleness={self.staleness.limit}. Training stops. Look "
                "for a restart or another trainer in the server's log."
            )
        return RLStep(list(result.groups), rows=rows, failed=list(result.failed))

    def _staleness(self, step: RLStep) -> dict[str, float]:
        spans = [span for trajectory in step.trajectories for span in trajectory.policy_spans]
        ages = [(self.step - (span.version or 0), len(span.token_ids)) for span in spans]
        counts = torch.tensor([sum(age * size for age, size in ages), sum(size for _, size in ages)])
        total, tokens = self.ranks.total(counts).tolist()
        oldest = self.ranks.largest(max((age for age, _ in ages), default=0))
        return {"staleness": total / max(tokens, 1), "staleness/max": float(oldest)}

    def _count(self, step: RLStep) -> tuple[int, int]:
        """Return how many groups train and how many are not frozen, over all ranks."""
        trained = sum(self._trains(group) for group in step.groups)
        played = sum(not group.frozen for group in step.groups)
        return self._total(trained), self._total(played)

    def _total(self, number: int) -> int:
        return int(self.ranks.total(torch.tensor(number)))

    def _observe(self, step: RLStep) -> None:
        """Report to the prompts how many episodes of each part or prompt succeeded, if the next prompts depend on it."""
        if not (key := self.prompts.watched):
            return
        members = [member for group in step.groups if not group.frozen for member in group.trajectories]
        played: dict[str, tuple[int, int]] = {}
        pairs = [(getattr(one, key), bool(one.success)) for one in members]
        for name, success in chain(*self.ranks.everyone(pairs)):
            succeeded, episodes = played.get(name, (0, 0))
            played[name] = succeeded + success, episodes + 1
        self.prompts.observe(played)
        step.counts |= self.prompts.metrics()

    def _trains(self, group: Group) -> bool:
        return not group.frozen and self.algorithm.keep(group)

    def _measures(
        self, update: Update, step: RLStep, batch: TrainBatch, logprobs_BT: Tensor, metrics: TokenMetrics
    ) -> TokenMetrics:
        """Record what is logged for each token, and return the mismatch of trainer and engine.

        The mismatch is measured only before the weights change, for tokens that the newest weights sampled at the training
        temperature.
        """
        needs = self.algorithm.needs()
        if step.trained is not None:
            before_BT = batch.old_logprobs_BT if needs.old_logprobs else logprobs_BT
            step.trained.add(update.records, batch, before_BT, metrics.get("clip_fraction"))
        if step.moved or needs.sampling:
            return {}
        newest_BT = sampled_by(self.step, update.records, batch) if self.mixes_versions else None
        return token_mismatch(batch, logprobs_BT, newest_BT)
