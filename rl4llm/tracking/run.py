"""Everything a run writes and shows, behind one face."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.ranks import Ranks
from rl4llm.core.run_dir import RunDir
from rl4llm.core.types import Group
from rl4llm.tracking.clock import Clock
from rl4llm.tracking.console import Console
from rl4llm.tracking.curve import plot_learning_curve
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.jsonl import JsonlTracker, read_jsonl
from rl4llm.tracking.resources import Resources
from rl4llm.tracking.summary import Episode, Failure, facts, faults, summarize_facts
from rl4llm.tracking.tensorboard import TensorBoardTracker
from rl4llm.tracking.tokens import TrainedTokens
from rl4llm.tracking.tracker import Tolerant, Tracker, Trackers
from rl4llm.tracking.wandb import WandbTracker


class RunTracker:
    """Console, metrics, TensorBoard, episodes, learning curve and resources of one run, in its directory.

    `begin` opens the logs at a step: what an earlier start of the run logged after it is cut off, since those steps are
    taken again. Writing that fails is told once and never stops training.

    Metrics are of all ranks together, and the first one writes them; each stores its own episodes.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        total_steps: int,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        episodes_every: int = 1,
        episodes_per_step: int = 0,
        config: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ):
        self._ranks = ranks or Ranks()
        self.console = Console(total_steps, quiet=not self._ranks.is_first, title=str(run.path))
        self._resources = Resources()
        self.clock = Clock(on_phase=self._show_phase, peak=self._resources.peak_gb)
        self._run = run
        self._tensorboard = tensorboard
        self._wandb_project = wandb_project
        self._episodes_every = episodes_every
        self._episodes_per_step = episodes_per_step
        self._config = dict(config or {})
        self._tolerant = Tolerant(self.warn)
        self._trackers: Trackers | None = None
        self._evals: Trackers | None = None
        self._episodes: EpisodeLog | None = None

    def begin(self, step: int) -> None:
        """Open the logs after `step` finished steps; -1 means from the start, evaluation of step 0 included."""
        run = self._run
        first = self._ranks.is_first
        makers: list[Callable[[], Tracker]] = [lambda: JsonlTracker(run.metrics_file, step)] if first else []
        if self._tensorboard and first:
            makers.append(lambda: TensorBoardTracker(run.tensorboard_dir, step))
        if self._wandb_project and first:
            makers.append(lambda: WandbTracker(run.path, self._wandb_project, run.run_id, self._config, self.warn))
        self._trackers = self._opened(makers)
        self._evals = self._opened([lambda: JsonlTracker(run.eval_file, step)] if first else [])
        with self._tolerant("episodes"):
            limits = self._episodes_every, self._episodes_per_step
            self._episodes = EpisodeLog(run.episodes_dir, *limits, step, self._ranks.rank)
        self.console.__enter__()
        if step >= 0:
            self._recall_evaluations()
            self.console.note(f"resumed {self._run.path} after step {step}")
        for change in self._run.changes:
            self.console.note(f"changed since the last start: {change}")
        for text in self._run.warnings:
            self.warn(text)

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        failed: Sequence[SampleState],
        updates: Sequence[Mapping[str, float]],
        *,
        tokens: int,
        credits: Sequence[Sequence[Any]] | None = None,
        counts: Mapping[str, float] | None = None,
        trained: TrainedTokens | None = None,
    ) -> None:
        """Log one finished step; `tokens` is how many it trained on or sampled, for tokens/s; engines count `counts`."""
        phases = self.clock.lap()
        if groups or failed:
            self._store_episodes(step, groups, failed, credits=credits, trained=trained)
        gathered = self._ranks.gather((tokens, facts(groups), faults(failed)))
        if not gathered:
            return
        tokens = sum(count for count, _, _ in gathered)
        metrics = {
            **(_summary(gathered) if groups or failed else {}),
            **_merged(updates),
            **(counts or {}),
            **phases,
            "tokens/s": tokens / max(phases.get("time/step", 0.0), 1e-9),
            **self._resources.metrics(),
        }
        self._trackers.log(step, metrics)
        self.console.step(step, metrics)

    def stores_episodes(self, step: int) -> bool:
        """Whether the episodes of this step will be kept."""
        return self._episodes is not None and self._episodes.due(step)

    def stopped_by(self, step: int, failed: Sequence[SampleState]) -> None:
        """Store the attempts that failed in a step that will not be finished because of them."""
        self._store_episodes(step, (), failed)

    def evaluation(self, step: int, groups: Sequence[Group], failed: Sequence[SampleState]) -> dict[str, float]:
        """Log one measurement of the held-out set; returns its metrics, on the first rank."""
        self._store_episodes(step, groups, failed, kind="eval")
        gathered = self._ranks.gather((0, facts(groups), faults(failed)))
        if not gathered:
            return {}
        metrics = _summary(gathered)
        self._evals.log(step, metrics)
        self._trackers.log(step, {f"eval/{name}": value for name, value in metrics.items()})
        self._draw_curve()
        self.console.evaluation(step, metrics)
        return metrics

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log what was measured on held-out rows, where nothing is sampled."""
        metrics = {name: value for name, value in metrics.items() if not name.startswith("update/")}
        self._evals.log(step, metrics)
        self._trackers.log(step, {f"eval/{name}": value for name, value in metrics.items()})
        self.console.note(f"held-out at step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def warn(self, text: str) -> None:
        """Tell the user something that must not be overlooked."""
        self.console.warn(text)

    def note(self, text: str) -> None:
        """Tell the user something worth a line."""
        self.console.note(text)

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        """Show a table."""
        self.console.table(rows, header, title)

    def close(self) -> None:
        """Write out what is pending, give the terminal back, and let the run's directory go."""
        with ExitStack() as stack:  # the terminal and the directory are given back whatever else goes wrong
            stack.callback(self._run.close)
            stack.callback(self.console.__exit__)
            for trackers in filter(None, (self._trackers, self._evals)):
                trackers.close()
            if self._trackers is not None and self._ranks.is_first:
                self._draw_curve()

    def _recall_evaluations(self) -> None:
        """The console says how far the run has come since its first start, not since this one."""
        with self._tolerant("evaluations"):
            for row in read_jsonl(self._run.eval_file):
                self.console.recall(row["step"], row)

    def _opened(self, makers: Sequence[Callable[[], Tracker]]) -> Trackers:
        """The trackers that could be opened."""
        trackers: list[Tracker] = []
        for make in makers:
            with self._tolerant("a log"):
                trackers.append(make())
        return Trackers(trackers, self._tolerant)

    def _show_phase(self, phase: str) -> None:
        if phase != "step":  # all the others are inside it
            self.console.phase(phase)

    def _store_episodes(
        self, step: int, groups: Sequence[Group], failed: Sequence[SampleState], **details: Any
    ) -> None:
        if self._episodes is not None:
            with self._tolerant("episodes"):
                self._episodes.log(step, groups, failed, **details)

    def _draw_curve(self) -> None:
        with self._tolerant("learning curve"):
            plot_learning_curve(self._run.metrics_file, read_jsonl(self._run.eval_file), self._run.curve_file)


def _summary(gathered: Sequence[tuple[int, list[list[Episode]], list[Failure]]]) -> dict[str, float]:
    """Metrics of what all ranks sampled."""
    failed = [failure for _, _, failures in gathered for failure in failures]
    return summarize_facts([group for _, groups, _ in gathered for group in groups], failed)


def _merged(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The optimizer steps of one step as one: sums of tokens, maxima of maxima, means of the rest."""
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        combine = max if name.endswith("/max") else sum if name == "update/tokens" else statistics.fmean
        merged[name] = combine(values)
    return merged
