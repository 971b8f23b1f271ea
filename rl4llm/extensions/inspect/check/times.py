"""How long a run takes: the parts of a step, measured on a few prompts of the run and extended to all of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rl4llm.compose import server_urls
from rl4llm.compose.trainer import AnyTrainer
from rl4llm.config import Config
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group
from rl4llm.envs.rollout import RolloutResult
from rl4llm.extensions.inspect.check.bench import Bench
from rl4llm.extensions.inspect.check.laws import rewarded
from rl4llm.trainers.dataset import DatasetTrainer
from rl4llm.trainers.rl import RLTrainer

T = TypeVar("T")
CONNECT_S = 2.0
PLAY_S = 5.0
"""How long to play at least, if the run has enough prompts; training on the episodes takes about as long again."""
LONG_S = 30.0
"""Fewer prompts are measured if the first ones take longer: the time of a step is then only a bound."""

Point = tuple[int, float]
"""A number of prompts, and the seconds that they took."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """The seconds of a step by part, of an evaluation, and of the whole run without its checkpoints.

    `prompts`, `episodes` and `tokens` (new ones of an episode, on average) are what was measured, in `measured_s` seconds.
    With `bound` a step takes at most that long: nothing shows what playing more prompts at once saves.
    """

    parts: dict[str, float]
    evaluation_s: float
    evaluations: int
    steps: int
    prompts: int
    episodes: int
    tokens: float
    measured_s: float
    bound: bool

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def run_s(self) -> float:
        return self.steps * self.step_s + self.evaluations * self.evaluation_s

    def as_json(self) -> dict[str, Any]:
        """Return everything, in seconds and tokens."""
        return {"step_s": self.step_s, "run_s": self.run_s, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        parts = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.parts.items())
        evaluated = (
            f" and {self.evaluations} evaluations of {span(self.evaluation_s)}" if self.evaluation_s else ""
        )
        about = "at most" if self.bound else "about"
        yield f"A step takes {about} {span(self.step_s)}: {parts}."
        yield f"The run takes {about} {span(self.run_s)}, for {self.steps:,} steps{evaluated}."
        yield (
            f"Measured on this machine in {span(self.measured_s)}: {self.prompts:,} prompts, {self.episodes:,} sequences of "
            f"{self.tokens:.0f} trained tokens."
        )
        yield "Assumed: one process, plain torch, sequences that stay this long, a gradient in every group, no checkpoints."


def measure(config: Config) -> RunTime:
    """Play and train on a few prompts of a run; nothing of the run is read or written.

    Raises ConfigError if the run has servers and none can be reached.
    """
    urls = server_urls(config)
    if urls and not any(map(_listens, urls)):
        raise ConfigError(
            f"--time needs a server, and none can be reached at {', '.join(urls)}. Start one first."
        )
    with closing(Bench(config)) as bench:
        return _measured(bench.build(), config)


def play(trainer: RLTrainer, prompts: int) -> RolloutResult:
    """Play the groups of the next prompts, as a step does. Raises ConfigError if no episode ends."""
    needs = trainer.algorithm.needs()
    result = trainer.rollout.play(
        trainer.prompts.next_batch(prompts),
        step=0,
        sampling_params=trainer.sampling_params,
        sampling=needs.sampling,
        greedy_baseline=needs.greedy_baseline,
    )
    if all(group.frozen for group in result.groups):
        raise ConfigError(f"No episode of {len(result.failed)} ended: {result.failed[0].failure}")
    return result


def train(trainer: AnyTrainer, groups: Sequence[Group]) -> None:
    """Take the optimizer steps of a rollout of these groups, with made-up rewards where it samples."""
    critic = trainer.algorithm.needs().critic
    samples = isinstance(trainer, RLTrainer)
    made_up = [rewarded(group, i) if samples else group for i, group in enumerate(groups) if not group.frozen]
    for update in trainer.preparation.prepare(made_up, critic.warmup_steps if critic else 0).updates:
        objective, model = trainer.objective(update), trainer.models()[update.model]
        for batch in update.batches:
            model.forward_backward(batch, **objective, last=batch is update.batches[-1])
        if update.batches:
            model.optim_step()


def seconds(function: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """Call a function; return its result and how long it took."""
    began = time.monotonic()
    return function(*arguments), time.monotonic() - began


def extended(points: Sequence[Point], prompts: float) -> float:
    """Return the seconds of `prompts` prompts, on a line through the last two points.

    Many episodes at once cost less than each alone, so one point gives a bound.

    >>> extended([(2, 3.0), (4, 4.0)], 8), extended([(2, 3.0)], 8)
    (6.0, 12.0)
    """
    (last, taken), (first, before) = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    slope = (taken - before) / (last - first)
    return taken + min(max(slope, 0.0), taken / last) * (prompts - last)


def span(duration_s: float) -> str:
    """Format seconds for people."""
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    if duration_s < 2 * 3600:
        return f"{duration_s / 60:.0f} minutes"
    return f"{duration_s / 3600:.1f} hours" if duration_s < 48 * 3600 else f"{duration_s / 86400:.1f} days"


def _measured(trainer: AnyTrainer, config: Config) -> RunTime:
    config = replace(config, max_steps=trainer.schedule.max_steps)
    began, prompts = time.monotonic(), config.rollout.prompts
    start = min(prompts, config.training.updates_per_rollout)
    trainer.publish()  # the first one also chooses the canary's tokens
    _, publish_s = seconds(trainer.publish)
    if not isinstance(trainer, RLTrainer):
        rounds = _grown(lambda number: _train_rows(trainer, number), start, prompts)
        return _of(config, {"training": extended(_points(rounds), prompts)}, rounds, began)
    rounds = _grown(lambda number: play(trainer, number).groups, start, prompts)
    trainer.inference.lend_device(trainer.backend)
    train(trainer, rounds[0][1])  # the first pass allocates
    trained = [(number, seconds(train, trainer, groups)[1]) for number, groups, _ in rounds]
    parts = {
        "rollout": extended(_points(rounds), prompts),
        "training": extended(trained, prompts),
        "weight sync": publish_s,
    }
    held_out = 0 if trainer.evaluation is None else trainer.evaluation.num_rows
    evaluation_s = extended(_points(rounds), held_out / trainer.rollout.group_size) if held_out else 0.0
    return _of(config, parts, rounds, began, evaluation_s, _evaluations(trainer) if held_out else 0)


def _of(
    config: Config,
    parts: dict[str, float],
    rounds: Sequence[tuple[int, Sequence[Group], float]],
    began: float,
    evaluation_s: float = 0.0,
    evaluations: int = 0,
) -> RunTime:
    number, groups, _ = rounds[-1]
    members = [one for group in groups for one in group.trajectories]
    return RunTime(
        parts=parts,
        evaluation_s=evaluation_s,
        evaluations=evaluations,
        steps=config.max_steps,
        prompts=number,
        episodes=len(members),
        tokens=sum(one.num_policy_tokens for one in members) / max(1, len(members)),
        measured_s=time.monotonic() - began,
        bound=len(rounds) == 1 and number < config.rollout.prompts,
    )


def _grown(
    make: Callable[[int], Sequence[Group]], start: int, most: int
) -> list[tuple[int, Sequence[Group], float]]:
    """Return the groups of `start` prompts, and of at least twice as many, with their seconds."""
    groups, taken = seconds(make, start)
    if taken < LONG_S:  # leave out what only a first round does
        groups, taken = seconds(make, start)
    rounds = [(start, groups, taken)]
    number = min(most, max(2 * start, int(start * PLAY_S / max(taken, 1e-3))))
    if number > start and taken < LONG_S:
        rounds.append((number, *seconds(make, number)))
    return rounds


def _train_rows(trainer: DatasetTrainer, number: int) -> Sequence[Group]:
    """Train on the next rows of a dataset; return them."""
    trainer.prompts.batch_size = number
    groups = trainer.collect().groups
    train(trainer, groups)
    return groups


def _points(rounds: Sequence[tuple[int, Sequence[Group], float]]) -> list[Point]:
    return [(number, taken) for number, _, taken in rounds]


def _listens(url: str) -> bool:
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), CONNECT_S):
            return True
    except OSError:
        return False


def _evaluations(trainer: RLTrainer) -> int:
    """Return how often a run evaluates; before the first step it always does."""
    schedule = trainer.schedule
    return 1 + sum(map(schedule.evaluates_after, range(1, schedule.max_steps + 1)))
