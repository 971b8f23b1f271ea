"""Everything that a run writes and shows, behind one class."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import PurePath
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.registry import PARTS, load, provided
from rl4llm.core.types import Group
from rl4llm.runs.run_dir import RunDir, write_atomically
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.terminal import notebook_shell
from rl4llm.tracking.alerts import Alert, Alerts
from rl4llm.tracking.console import Console, Mode
from rl4llm.tracking.episodes import EpisodeLog, TrainedTokens, episode_rows
from rl4llm.tracking.resources import PhaseClock, Resources
from rl4llm.tracking.summary import Episode, Failure, facts, faults, last_words, summarize_facts, unread
from rl4llm.tracking.tracker import (
    TRACKERS,
    JsonlTracker,
    Tolerant,
    TrackedRun,
    Tracker,
    Trackers,
    read_jsonl,
    rounded,
)

Gathered = tuple[int, list[list[Episode]], list[Failure]]
"""What a rank trained on or sampled: tokens, episodes by group, failures."""


class RunTracker:
    """Console, metrics, episodes, learning curve and resources of one run, in its directory, and `trackers` by name:
    tensorboard and services, where it is a run of `project`.

    `begin` opens the logs at a step and removes later rows of an earlier start, since the run repeats those steps. A failed
    write is reported once and never stops training.

    Metrics cover all ranks, and the first rank writes them; each rank stores its own episodes.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        total_steps: int,
        trackers: Sequence[str] = ("tensorboard",),
        project: str = "rl4llm",
        episodes_every: int = 1,
        episodes_per_step: int = 0,
        config: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        console: Mode = "auto",
    ):
        self._ranks = ranks or Ranks()
        mode = console if self._ranks.is_first else "quiet"
        self.console = _console(run, mode)(total_steps, mode)
        self._resources = Resources()
        self.clock = PhaseClock(on_phase=self._show_phase, peak=self._resources.peak_gb)
        self._run = run
        self._names = tuple(trackers)
        self._project = project
        self._episodes_every = episodes_every
        self._episodes_per_step = episodes_per_step
        self._config = dict(config or {})
        self._tolerant = Tolerant(self.warn)
        self._trackers = self._evals = Trackers([], self._tolerant)  # until `begin`
        self._alerts = Alerts()
        self._alert_file: JsonlTracker | None = None
        self._episodes: EpisodeLog | None = None
        self._step = self._drawn = -1
        self._answers_checked = False

    def begin(self, step: int) -> None:
        """Open the logs after `step` finished steps; -1 means from the start, evaluation of step 0 included."""
        run = self._run
        is_first = self._ranks.is_first
        self._trackers = self._opened(["metrics.jsonl", *self._names] if is_first else [], step)
        self._evals = self._opened(["eval.jsonl"] if is_first else [], step)
        if is_first:
            self._open_alerts(step)
        with self._tolerant("episodes"):
            limits = self._episodes_every, self._episodes_per_step
            self._episodes = EpisodeLog(run.episodes_dir, *limits, step, self._ranks.rank)
        self.console.__enter__()
        if step >= 0:
            # The console compares with the first start of the run.
            with self._tolerant("evaluations"):
                for row in read_jsonl(run.eval_file):
                    self.console.recall(row["step"], row)
            self.console.note(f"resumed {run.path} after step {step}")
        for change in run.changes:
            self.console.note(f"changed since the last start: {change}")
        for text in run.warnings:
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
            self._check_answers(step, groups)
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
        self._step = step
        self._trackers.log(step, metrics)
        self._trackers.phases(step, self.clock.lapped)
        self.console.step(step, metrics)
        alerts = self._alerts.take(step, metrics)
        self.console.alerts(self._alerts.open)
        for alert in alerts:  # that begin or end in this step
            (self.console.warn if alert.until is None else self.console.note)(str(alert))
            self._keep(alert)

    def stores_episodes(self, step: int) -> bool:
        return self._episodes is not None and self._episodes.due(step)

    def stopped_by(self, step: int, failed: Sequence[SampleState]) -> None:
        """Store the failed samples of a step that they stop."""
        self._store_episodes(step, (), failed)

    def evaluation(
        self, step: int, groups: Sequence[Group], failed: Sequence[SampleState]
    ) -> dict[str, float]:
        """Log an evaluation on the held-out set; return its metrics on the first rank."""
        self._store_episodes(step, groups, failed, kind="eval")
        gathered = self._ranks.gather((0, facts(groups), faults(failed)))
        if not gathered:
            return {}
        metrics = _summary(gathered)
        self._evals.log(step, metrics)
        self._trackers.log(step, {f"eval/{name}": value for name, value in metrics.items()})
        if rows := episode_rows(groups):
            self._trackers.table(step, "eval/episodes", rows)
        self._draw_curve(step)
        self.console.evaluation(step, metrics)
        return metrics

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation on held-out rows without sampling."""
        metrics = {name: value for name, value in metrics.items() if not name.startswith("update/")}
        self._evals.log(step, metrics)
        self._trackers.log(step, {f"eval/{name}": value for name, value in metrics.items()})
        numbers = ", ".join(f"{name} {rounded(value)}" for name, value in metrics.items())
        self.console.note(f"held-out at step {step}: {numbers}")

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def code_changed(self, step: int, names: Sequence[str]) -> None:
        """Show, and keep for the viewer, that code differs from that of the first `step` steps."""
        for name in names:
            seen, why = f"the code of `{name}` changed", "Numbers before and after it may not compare."
            self.warn(f"{seen[0].upper()}{seen[1:]} at step {step}. {why}")
            look_at = "the change, or set another output.dir"
            self._keep(Alert("other code", step + 1, step, None, f"{seen} at step {step}", why, look_at))

    def _keep(self, alert: Alert) -> None:
        """Write an alert for the viewer."""
        with self._tolerant("alerts.jsonl"):
            if self._alert_file is not None:
                self._alert_file.append(asdict(alert))

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.note(text)

    def table(self, rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str = "") -> None:
        self.console.table(rows, header, title)

    def close(self) -> None:
        """Write pending output, and release the terminal and the run's directory."""
        with ExitStack() as stack:  # releases the terminal and the directory after any error
            stack.callback(self._run.close)
            stack.callback(self.console.__exit__)
            self.clock.lap()
            self._trackers.phases(max(self._step, 0), self.clock.lapped)
            if self._ranks.is_first and self._step > self._drawn:
                self._draw_curve(self._step)
            for trackers in (self._trackers, self._evals):
                trackers.close()
            if self._alert_file is not None:
                self._alert_file.close()

    def _check_answers(self, step: int, groups: Sequence[Group]) -> None:
        """Warn if the rewards found no answer in the first step of this start."""
        members = [trajectory for group in groups if not group.frozen for trajectory in group.trajectories]
        if self._answers_checked or not members or not self._ranks.is_first:
            return
        self._answers_checked = True
        if all(map(unread, members)):
            self.warn(
                f"The rewards found no answer in any of the {len(members)} episodes of step {step}, such as "
                f"{last_words(members[0])!r}. Next: ask for the format in data.system_prompt, or set `extract` of the "
                "reward. `rl4llm check CONFIG --task` shows the effect."
            )

    def _open_alerts(self, step: int) -> None:
        """Open the file of alerts, and replay the steps before this start, whose alerts were already reported."""
        with self._tolerant("alerts.jsonl"):
            self._alert_file = JsonlTracker(self._run.alerts_file, step, self.warn)
        with self._tolerant("metrics.jsonl"):
            for row in read_jsonl(self._run.metrics_file):
                if "tokens/s" in row:  # a step, not an evaluation
                    self._alerts.take(row["step"], row)
        self.console.alerts(self._alerts.open)

    def _opened(self, names: Sequence[str], step: int) -> Trackers:
        run = self._run
        tracked = TrackedRun(run.path, step, self._project, run.run_id, self._config, self.warn)
        files = {"metrics.jsonl": run.metrics_file, "eval.jsonl": run.eval_file}
        trackers: list[Tracker] = []
        for name in names:
            with self._tolerant(name):
                file = files.get(name)
                trackers.append(JsonlTracker(file, step, self.warn) if file else TRACKERS[name](tracked))
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

    def _title(self) -> str:
        model, algorithm = (str(self._config.get(key) or "") for key in ("model.path", "algorithm.name"))
        model = "" if "${" in model else PurePath(model).name  # a variable of the environment is left out
        return ", ".join(filter(None, (self._run.path.resolve().name, model, algorithm.upper())))

    def _draw_curve(self, step: int) -> None:
        from rl4llm.tracking.curve import picture  # noqa: PLC0415 - once or twice a run

        run = self._run
        with self._tolerant("learning curve"):
            if png := picture(read_jsonl(run.metrics_file), read_jsonl(run.eval_file), self._title()):
                write_atomically(run.curve_file, png)
                self._trackers.picture(step, "learning_curve", run.curve_file)
                self._drawn = step


def _console(run: RunDir, mode: Mode) -> Callable[..., Console]:
    """Return what makes the console: in a notebook one that shows a picture, if an extension provides it."""
    if mode != "auto" or notebook_shell() is None:
        return Console
    part = provided(PARTS).get("notebook_console")
    return partial(load(part), run) if part else Console


def _summary(gathered: Sequence[Gathered]) -> dict[str, float]:
    """Return metrics of what all ranks sampled."""
    failed = [failure for _, _, failures in gathered for failure in failures]
    return summarize_facts([group for _, groups, _ in gathered for group in groups], failed)


def _merged(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of the optimizer steps of one step: sums of tokens, maxima of maxima, means of the rest."""
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        combine = max if name.endswith("/max") else sum if name == "update/tokens" else statistics.fmean
        merged[name] = combine(values)
    return merged
