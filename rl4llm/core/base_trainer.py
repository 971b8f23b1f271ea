"""The loop that every trainer shares. Read `train` first; each line of it is one function."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint, unfinished_saves
from rl4llm.core.errors import CheckpointError, NotFiniteError
from rl4llm.core.failed_update import save_update
from rl4llm.core.ranks import Ranks
from rl4llm.core.rng import restore_rng, rng_state
from rl4llm.core.run_dir import RunDir, replace_directory
from rl4llm.core.types import TrainBatch, Update
from rl4llm.core.watchdog import Watchdog

Collected = TypeVar("Collected")


@dataclass(frozen=True, slots=True)
class Schedule:
    """When things happen, in steps; 0 is never, but for a checkpoint at the end.

    After `max_skipped` optimizer steps in a row that were not finite, training stops, and one of several ranks ends when a
    phase takes longer than `timeout_s`.
    """

    max_steps: int
    evaluate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    max_skipped: int = 3
    timeout_s: float = 1800.0

    def evaluates_after(self, step: int) -> bool:
        """Whether the held-out set is measured after so many finished steps."""
        return self.evaluate_every > 0 and (step == self.max_steps or step % self.evaluate_every == 0)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is written after so many finished steps."""
        return step == self.max_steps or (self.checkpoint_every > 0 and step % self.checkpoint_every == 0)


class Clock(Protocol):
    """Times the phases of a step: ``with clock("rollout"): ...``."""

    def __call__(self, phase: str) -> AbstractContextManager[Any]: ...


class BaseTrainer(ABC, Generic[Collected]):
    """Collect, prepare, update, publish, report; evaluate and save when due; resume from whatever was saved last.

    A step is one turn of the loop. `step` counts finished ones and is the version of the weights.
    """

    def __init__(
        self,
        *,
        algorithm: BaseAlgorithm,
        backend: BaseBackend,
        clock: Clock,
        schedule: Schedule,
        run: RunDir,
        ranks: Ranks | None = None,
    ):
        self.algorithm = algorithm
        self.backend = backend
        self.watchdog = Watchdog(ranks or Ranks(), schedule.timeout_s)
        self.clock = self.watchdog.around(clock)
        self.schedule = schedule
        self.run = run
        self.ranks = ranks or Ranks()
        self.step = 0
        self.stopped = False  # by a signal, before max_steps
        self._stop_requested = threading.Event()
        self._stopping = False  # all ranks
        self._skipped: dict[str, int] = {}  # optimizer steps in a row, by model

    def train(self) -> None:
        """Run until `max_steps`, or until a signal asks to stop; then the finished steps are saved."""
        with self.watchdog, self.ranks.together():
            self.resume()
            self.publish()  # engines start from the trainer's weights, and prove it
            if self.step == 0:
                self.evaluate()
            if self.step >= self.schedule.max_steps:
                self.warn(f"Nothing to do: {self.step} steps are done, and max_steps={self.schedule.max_steps}.")
            with self._stop_on_signals():
                while self.step < self.schedule.max_steps and not self._stopping:
                    with self.clock("step"):
                        collected = self.collect()
                        updates = self.prepare(collected)
                        metrics = [self.update(update) for update in updates]
                        self.step += 1
                        self.publish()
                    self.report(collected, metrics)
                    self._end_step()
            self.stopped = self.step < self.schedule.max_steps
            if not self.stopped:
                self._write_model()

    def _end_step(self) -> None:
        """Evaluate and save when due. A signal may reach one rank first, and stops all."""
        self._stopping = self.ranks.largest(self._stop_requested.is_set()) > 0
        if self.schedule.evaluates_after(self.step):
            self.evaluate()
        if self.schedule.saves_after(self.step) or self._stopping:
            self.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of the run's directory, engines, environments and logs."""

    @abstractmethod
    def collect(self) -> Collected:
        """What this step learns from."""

    @abstractmethod
    def prepare(self, collected: Collected) -> list[Update]:
        """The optimizer steps of this step."""

    @abstractmethod
    def publish(self) -> None:
        """Hand version `step` of the weights to the engines, and have them prove it."""

    @abstractmethod
    def report(self, collected: Collected, metrics: Sequence[dict[str, float]]) -> None:
        """Log what was sampled and what was learned."""

    @abstractmethod
    def evaluate(self) -> None:
        """Measure on the fixed held-out set."""

    def update(self, update: Update) -> dict[str, float]:
        """One optimizer step. Without any token that could teach something, the weights stay as they are."""
        if not update.batches:
            return {"update/empty": 1.0}
        with self.clock("update"):
            count = len(update.batches)
            parts = [self.forward_backward(batch, number == count) for number, batch in enumerate(update.batches, 1)]
            metrics = self.ranks.merge(merge(parts)) | self.backend.optim_step()
            self.watch(update, metrics, "model")
            return metrics

    def forward_backward(self, batch: TrainBatch, last: bool = True) -> dict[str, float]:
        """One micro-batch; the backend is told which is the last one of an optimizer step."""
        return self.backend.forward_backward(
            batch, self.algorithm.token_losses, entropy=self.algorithm.needs().entropy, last=last
        )

    def watch(self, update: Update, metrics: dict[str, float], model: str) -> None:
        """Stop with NotFiniteError when steps of one of the `models` are skipped again and again."""
        skipped = self._skipped[model] = self._skipped.get(model, 0) + 1 if "skipped" in metrics else 0
        if skipped < self.schedule.max_skipped:
            return
        directory = self.run.failed_dir / f"step-{self.step + 1:06d}"
        shown = {name: repr(value) for name, value in metrics.items()}  # JSON has no NaN
        if not self.ranks.is_first:
            directory = directory.with_name(f"{directory.name}-rank{self.ranks.rank}")
        facts = {"step": self.step + 1, "model": model, "algorithm": self.algorithm.state(), "metrics": shown}
        save_update(directory, update.batches, self.models()[model], facts)
        raise NotFiniteError(
            f"{skipped} optimizer steps in a row were not finite (training.max_skipped), the last in step "
            f"{self.step + 1}: loss {metrics['loss']:.3g}, gradient norm {metrics['grad_norm']:.3g}. The weights are as "
            f"they were before. Next: `rl4llm replay {directory}` shows where it comes from; the run itself goes on "
            "from the last checkpoint."
        )

    def save(self) -> None:
        """Write a checkpoint: weights, optimizer, schedule, random states, prompt cursor, step."""
        with self.clock("checkpoint"):
            rng = self.ranks.gather(rng_state())
            about = {"run": self.run.run_id, "step": self.step, "rng": rng, "algorithm": self.algorithm.state()}
            save_checkpoint(
                self.run.checkpoints_dir,
                self.step,
                self.write_checkpoint,
                state=about | self.state(),
                keep=self.schedule.keep_checkpoints,
                ranks=self.ranks,
            )

    def resume(self) -> None:
        """Continue from the newest checkpoint that is whole; without any, start at step 0."""
        root, run_id = self.run.checkpoints_dir, self.run.run_id
        newest = latest_checkpoint(root, run_id) if self.ranks.is_first else None
        checkpoint: Checkpoint | None = self.ranks.share(newest)
        if checkpoint is None:
            self.begin(-1)
            for partial in unfinished_saves(root):
                self.warn(f"{partial} is an unfinished save and is not used; no save was finished, so training starts anew.")
            return
        for name, model in self.models().items():
            if not (checkpoint.path / name).is_dir():
                raise CheckpointError(f"{checkpoint.path} holds no {name}: it is of a run without one. Begin a new run.")
            model.load(checkpoint.path / name)
        self._restore_rng(checkpoint.state["rng"])
        self.step = checkpoint.state["step"]
        self.algorithm.restore(checkpoint.state.get("algorithm", {}))
        self.restore(checkpoint.state)
        self.begin(self.step)
        for reason in checkpoint.skipped:
            self.warn(reason)

    def write_checkpoint(self, directory: Path) -> dict[str, str]:
        """Fill the directory of a new checkpoint; returns the hashes of files that are known already."""
        hashes: dict[str, str] = {}
        for name, model in self.models().items():
            if self.ranks.is_first:
                (directory / name).mkdir()
            self.ranks.wait()
            hashes |= {f"{name}/{file}": found for file, found in model.save(directory / name).items()}
        return hashes

    def models(self) -> dict[str, BaseBackend]:
        """The models that a checkpoint holds, by the name of their directory."""
        return {"model": self.backend}

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write what was trained, as others can load it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What else a resumed run needs, as JSON."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; called on resume, before the first step."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Open the logs after `step` finished steps, or for a new run at -1."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Tell the user something that must not be overlooked."""

    def _write_model(self) -> None:
        """Put what was trained into the run's directory; the first rank writes, the others give their share."""
        if self.ranks.is_first:
            replace_directory(self.run.model_dir, self.export)
        else:
            self.export(self.run.model_dir)
        self.ranks.wait()

    def _restore_rng(self, states: list[dict[str, Any]]) -> None:
        if len(states) != self.ranks.size:
            self.warn(f"The checkpoint is of {len(states)} ranks, not {self.ranks.size}: random states are not restored.")
            return
        for lost in restore_rng(states[self.ranks.rank]):
            self.warn(lost)

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM finishes the step and saves; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            yield
            return

        def request_stop(number: int, frame: Any) -> None:
            if self._stop_requested.is_set():
                raise KeyboardInterrupt
            self._stop_requested.set()
            self.warn(f"{signal.Signals(number).name}: finishing step {self.step + 1}, then saving. Again: stop at once.")

        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, request_stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


BaseRLTrainer = BaseTrainer
"""The name of the project that this one took its interfaces from."""


def merge(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of one optimizer step from those of its micro-batches.

    "loss" adds up and so does "tokens", as "update/tokens"; names ending in "/max" take the maximum; those in "/weighted"
    add up and lose that ending; all others are means over the policy's tokens.
    """
    tokens = sum(part["tokens"] for part in parts)
    merged = {"loss": sum(part["loss"] for part in parts), "update/tokens": tokens}
    for name in parts[0]:
        if name in ("loss", "tokens"):
            continue
        if name.endswith("/max"):
            merged[name] = max(part[name] for part in parts)
        elif name.endswith("/weighted"):
            merged[name.removesuffix("/weighted")] = sum(part[name] for part in parts)
        else:
            merged[name] = sum(part[name] * part["tokens"] for part in parts) / max(tokens, 1)
    return merged
