"""What `rollout.max_staleness` takes in memory, and how long a step would be with other values of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl4llm.compose.setup import stale_note
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.inspect.check.times import RunTime, span
from rl4llm.extensions.inspect.plan.plan import RunPlan
from rl4llm.extensions.inspect.plan.show import size_text
from rl4llm.inference.embedded.kv_cache import KVCache
from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.tracker import read_jsonl

BOUNDS = (0, 1, 2, 4)
TOKEN = 68
"""Bytes of a sampled token in the trainer: its number and its log-prob, as Python objects."""
STORED = 33
"""Bytes of a sampled token in a checkpoint: its number, log-prob and text, as JSON."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What plays at once, at most: groups and sequences, bytes of their tokens in the trainer and of their caches.

    `stored` are the bytes of a checkpoint's files for what has been played and not trained.
    """

    bound: int
    groups: int
    sequences: int
    tokens: int
    cache: int
    stored: int
    options: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        yield (
            f"With rollout.max_staleness={self.bound}, up to {self.groups:,} groups of {self.sequences:,} sequences are "
            f"under way: {size_text(self.tokens)} of tokens in the trainer, and {size_text(self.cache)} of keys and values "
            f"on servers to run all of them at once. A checkpoint stores up to {size_text(self.stored)} of them."
        )
        yield from filter(None, [self.options])


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a step that plays, then trains: a rollout, from its first prompt to its last episode, and all the rest."""

    rollout_s: float
    training_s: float

    def step_s(self, bound: int, busy: float) -> float:
        """Return the seconds of a step, if one rollout at a time keeps the servers `busy`, a share from 0 to 1.

        The trainer trains in each step, and the servers sample a batch. An episode that begins `bound` steps early has
        `bound` + 1 steps to play and train.

        >>> [Overlap(30.0, 10.0).step_s(bound, busy=0.5) for bound in (0, 1, 4)]
        [40.0, 20.0, 15.0]
        """
        alone_s = self.rollout_s + self.training_s
        return max(self.training_s, busy * self.rollout_s, alone_s / (bound + 1))

    def as_json(self) -> dict[str, Any]:
        steps = {str(bound): [self.step_s(bound, 0.0), self.step_s(bound, 1.0)] for bound in BOUNDS}
        return {**asdict(self), "step_s": steps}

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        least = ", ".join(f"{span(self.step_s(bound, 0.0))} with {bound}" for bound in BOUNDS[1:])
        yield (
            f"rollout.max_staleness=0 takes {span(self.step_s(0, 1.0))} a step, {span(self.rollout_s)} of it to play. Above "
            f"0 it is {span(self.step_s(1, 1.0))} if a rollout keeps the servers busy to its end. The less busy they are, "
            f"as with slow tools or a few long answers, the closer it is to {least}."
        )


def under_way(plan: RunPlan) -> UnderWay | None:
    """Return what plays at once; None if episodes do not begin early."""
    config, counts = plan.config, plan.counts
    bound = config.rollout.max_staleness
    if not bound:
        return None
    ahead = (bound + 1) * plan.devices
    sequences = ahead * counts.trajectories
    number = plan.machine.precision.computed
    return UnderWay(
        bound,
        ahead * counts.prompts * counts.roles,
        sequences,
        sequences * counts.longest * TOKEN,
        KVCache.memory(plan.models.policy, sequences, counts.longest, number),
        bound * plan.devices * counts.trajectories * counts.longest * STORED,
        stale_note(config),
    )


def of_time(measured: RunTime | None) -> Overlap | None:
    """Return the parts of a step that were measured; None if it plays nothing."""
    if measured is None or "rollout" not in measured.parts:
        return None
    rollout_s = measured.parts["rollout"]
    return Overlap(rollout_s, measured.step_s - rollout_s)


def of_run(directory: str | None) -> Overlap | None:
    """Return the medians of a run with rollout.max_staleness=0, if one is given. Raises ConfigError for another one."""
    if directory is None:
        return None
    rows = [row for row in read_jsonl(RunDir(Path(directory)).metrics_file) if "time/rollout" in row]
    if not rows or any("staleness" in row for row in rows):
        found = "has rollout.max_staleness above 0" if rows else "has no finished step that played episodes"
        raise ConfigError(
            f"--run {directory}: it {found}. Accepted: a run with rollout.max_staleness=0, whose rollouts take their whole "
            "time."
        )
    rollout_s = statistics.median(row["time/rollout"] for row in rows)
    return Overlap(rollout_s, statistics.median(row["time/step"] - row["time/rollout"] for row in rows))
