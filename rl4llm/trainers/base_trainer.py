"""The loop that every trainer shares. Read `train` first."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_backend import BaseBackend, of_update
from rl4llm.core.errors import NotFiniteError, RL4LLMError, RunDirError
from rl4llm.core.types import Group, Trajectory, Update
from rl4llm.runs.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    restore_rng,
    rng_state,
    save_checkpoint,
    unfinished_saves,
)
from rl4llm.runs.run_dir import RunDir, replace_directory
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.returned import checked_losses
from rl4llm.runtime.watchdog import Watchdog, stop_on_signals
from rl4llm.tracking.run import RunTracker


@dataclass(slots=True)
class Step:
    """The record of one turn of the loop: `collect` makes it, `prepare` and `update` add to it, `report` logs it.

    `metrics` are those of its optimizer steps, the `updates`.
    """

    groups: list[Group] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


AnyStep = TypeVar("AnyStep", bound=Step)
ROUNDED = 2.0**-25  # of a weight: float32 rounds a smaller change away
CODE = f"code of {sys.implementation.cache_tag}"  # another Python compiles the same code to another digest


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often things happen, in steps. 0 means never, except that a checkpoint is saved at the end.

    Training stops after `max_skipped` consecutive non-finite optimizer steps. One of several ranks exits when a phase
    takes longer than `timeout_s` seconds.
    """

    max_steps: int
    evaluate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    max_skipped: int = 3
    timeout_s: float = 1800.0

    def evaluates_after(self, step: int) -> bool:
        """Return whether to evaluate after `step` finished steps."""
        return self.evaluate_every > 0 and (step == self.max_steps or step % self.evaluate_every == 0)

    def saves_after(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` finished steps."""
        return step == self.max_steps or (self.checkpoint_every > 0 and step % self.checkpoint_every == 0)


class BaseTrainer(ABC, Generic[AnyStep]):
    """Collect, prepare, update, publish, report; evaluate and save when due; resume from the last checkpoint.

    A step is one turn of the loop. `step` counts finished ones and is the version of the weights.
    """

    def __init__(
        self,
        *,
        algorithm: BaseAlgorithm,
        backend: BaseBackend,
        tracker: RunTracker,
        schedule: Schedule,
        run: RunDir,
        code: Mapping[str, str] | None = None,
        ranks: Ranks | None = None,
    ):
        self.algorithm = algorithm
        self.backend = backend
        self.watchdog = Watchdog(ranks or Ranks(), schedule.timeout_s)
        self.tracker = tracker
        self.clock = self.watchdog.around(tracker.clock)
        self.schedule = schedule
        self.run = run
        self.code = {CODE: dict(code or {})}
        self.ranks = ranks or Ranks()
        self.step = 0
        self.stopped = False  # by a signal, before max_steps
        # of the model since this start, by whether its weights moved
        self.updates: Counter[bool] = Counter()
        self._stop_requested = threading.Event()
        self._finishing = 1  # the step after which a signal stops
        self._skipped: Counter[str] = Counter()  # optimizer steps in a row, by model

    def train(self) -> None:
        """Train until `max_steps` or until a stop signal, and save the finished steps."""
        with self.watchdog, self.ranks.together():
            self.resume()
            self.publish()  # engines start from the trainer's weights, and prove it
            if self.step == 0:
                self.evaluate()
            if self.step >= self.schedule.max_steps:
                self.warn(
                    f"Nothing to do: {self.step} steps are finished. Raise max_steps={self.schedule.max_steps} to continue."
                )
            with stop_on_signals(self._stop_requested, self._warn_of_stop):
                stopping, self._finishing = False, self.step + 1  # all ranks stop after a signal to one
                while self.step < self.schedule.max_steps and not stopping:
                    with self.clock("step"):
                        step = self.collect()
                        step.updates = self.prepare(step)
                        step.metrics = [self.update(update, step) for update in step.updates]
                        self.step += 1
                        self.publish()
                    self.report(step)
                    self.run.check_kept()
                    del step  # and its tensors, before the next rollout
                    if self.schedule.evaluates_after(self.step):
                        self.evaluate()
                    stopping = self.ranks.largest(self._stop_requested.is_set()) > 0
                    self._finishing = min(self.step + 1, self.schedule.max_steps)
                    if self.schedule.saves_after(self.step) or stopping:
                        self.save()
            self.stopped = self.step < self.schedule.max_steps
            if not self.stopped:
                self._write_model()

    def _warn_of_stop(self, cause: str) -> None:
        """Say which step ends before the run stops; `cause` names the signal."""
        self.warn(
            f"{cause}: finishing step {self._finishing}, then saving. Send it again to stop immediately."
        )

    def _write_model(self) -> None:
        """Write the trained model into the run's directory; the first rank writes, the others send their parts."""
        if self.ranks.is_first:
            models = self.models().values()
            replace_directory(
                self.run.model_dir, self.export, lambda: sum(model.exported_bytes() for model in models)
            )
        else:
            self.export(self.run.model_dir)
        self.ranks.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the run's directory, engines, environments and logs."""
        self.tracker.close()

    @abstractmethod
    def collect(self) -> AnyStep:
        """Return the record of a new step with the data that it learns from."""

    @abstractmethod
    def prepare(self, step: AnyStep) -> list[Update]:
        """Return the optimizer steps of this step."""

    @abstractmethod
    def publish(self) -> None:
        """Load version `step` of the weights into the engines, and check that they hold it."""

    @abstractmethod
    def report(self, step: AnyStep) -> None:
        """Log what was sampled and learned."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate on the held-out set."""

    def update(self, update: Update, step: AnyStep) -> dict[str, float]:
        """Take one optimizer step of one model. Without a token to learn from, its weights stay unchanged."""
        metrics = {"update/empty": 1.0}
        if update.batches:
            model, objective = self.models()[update.model], self.objective(update, step)
            with self.clock("update" if update.model == "model" else update.model):
                last = update.batches[-1]
                parts = [
                    model.forward_backward(batch, **objective, last=batch is last) for batch in update.batches
                ]
                metrics = of_update(parts, self.ranks) | model.optim_step()
                self.watch(update, metrics)
        self.updates[metrics.get("update_ratio", len(update.batches)) > ROUNDED] += update.model == "model"
        return self.after_update(update, step, metrics)

    def objective(self, update: Update, step: AnyStep | None = None) -> dict[str, Any]:
        """Return the arguments of `BaseBackend.forward_backward` other than the batches of an update."""
        return {"token_losses": checked_losses(self.algorithm), "entropy": self.algorithm.needs().entropy}

    def after_update(self, update: Update, step: AnyStep, metrics: dict[str, float]) -> dict[str, float]:
        """Handle a finished optimizer step; return its metrics under the names of the log."""
        return metrics

    def watch(self, update: Update, metrics: dict[str, float]) -> None:
        """Raise NotFiniteError when too many consecutive steps of one of the `models` were skipped."""
        model = update.model
        skipped = self._skipped[model] = self._skipped[model] + 1 if "skipped" in metrics else 0
        if skipped < self.schedule.max_skipped:
            return
        from rl4llm.runs.failed_update import save_update  # noqa: PLC0415 - most runs never need it

        rank = "" if self.ranks.is_first else f"-rank{self.ranks.rank}"
        directory = self.run.failed_dir / f"step-{self.step + 1:06d}{rank}"
        values = {name: repr(value) for name, value in metrics.items()}  # JSON has no NaN
        facts = {
            "step": self.step + 1,
            "model": model,
            "algorithm": self.algorithm.state(),
            "metrics": values,
        }
        save_update(directory, update.batches, self.models()[model], facts)
        raise NotFiniteError(
            f"{skipped} optimizer steps in a row were not finite (training.max_skipped), the last one in step "
            f"{self.step + 1}: loss {metrics['loss']:.3g}, gradient norm {metrics['grad_norm']:.3g}. The weights are "
            f"unchanged. Next: `rl4llm check {directory}` shows the cause. The same command resumes from the last "
            "checkpoint."
        )

    def save(self) -> None:
        """Write a checkpoint: weights, optimizer, schedule, random states, prompt cursor, step."""
        with self.clock("checkpoint"):
            about = {"run": self.run.run_id, "step": self.step, "rng": self.ranks.gather(rng_state())}
            save_checkpoint(
                self.run.checkpoints_dir,
                self.step,
                self.write_checkpoint,
                state=about | self.code | {"algorithm": self.algorithm.state()} | self.state(),
                keep=self.schedule.keep_checkpoints,
                ranks=self.ranks,
                num_bytes=sum(model.saved_bytes() for model in self.models().values()),
            )

    def claim(self) -> None:
        """Lock the run's directory for this trainer; the first rank holds the lock, and a failure stops all ranks."""
        claim = self.run.claim if self.ranks.is_first else lambda: None
        refused = RunDirError(f"{self.run.path} cannot be used. See the message of rank 0.")
        self.ranks.agree(claim, (RL4LLMError,), refused)

    def resume(self) -> None:
        """Resume from the newest complete checkpoint; without one, start at step 0."""
        self.claim()
        root, run_id = self.run.checkpoints_dir, self.run.run_id
        newest = latest_checkpoint(root, run_id) if self.ranks.is_first else None
        checkpoint: Checkpoint | None = self.ranks.share(newest)
        if checkpoint is None:
            self.begin(-1)
            for partial in unfinished_saves(root):
                self.warn(f"{partial} is an unfinished save, so it is ignored. Training starts at step 0.")
            return
        for name, model in self.models().items():
            model.load(checkpoint.path / name)
        states = checkpoint.state["rng"]
        lost = [
            f"The checkpoint has random states of {len(states)} ranks, but this run has {self.ranks.size}. None is restored."
        ]
        if len(states) == self.ranks.size:
            lost = list(restore_rng(states[self.ranks.rank]))
        self.step = checkpoint.state["step"]
        self.algorithm.restore(checkpoint.state.get("algorithm", {}))
        self.restore(checkpoint.state)
        self.restore_files(checkpoint.path)
        self.begin(self.step)
        for reason in (*lost, *checkpoint.skipped):
            self.warn(reason)
        was, now = checkpoint.state.get(CODE, {}), self.code[CODE]
        self.tracker.code_changed(self.step, [name for name in now if was.get(name, now[name]) != now[name]])

    def write_checkpoint(self, directory: Path) -> dict[str, str]:
        """Fill the directory of a new checkpoint; return the hashes of files that are already known."""
        hashes: dict[str, str] = {}
        for name, model in self.models().items():
            if self.ranks.is_first:
                (directory / name).mkdir()
            self.ranks.wait()
            hashes |= {f"{name}/{file}": digest for file, digest in model.save(directory / name).items()}
        return hashes

    def restore_files(self, directory: Path) -> None:
        """Read what `write_checkpoint` wrote beside the models; called after `restore`."""

    def models(self) -> dict[str, BaseBackend]:
        """Return the models of a checkpoint by the name of their directory."""
        return {"model": self.backend}

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the trained model in a form that other programs load."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the other state that a resumed run needs, as JSON."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; called on resume, before the first step."""

    def begin(self, step: int) -> None:
        """Open the logs after `step` finished steps; -1 means a new run."""
        self.tracker.begin(step)

    def warn(self, text: str) -> None:
        self.tracker.warn(text)


BaseRLTrainer = BaseTrainer
"""Another name, from the project whose interfaces this one shares."""
