"""Run a model without training: evaluate it on held-out prompts, or play episodes and store them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl4llm.commands.output import say
from rl4llm.commands.scratch import scratch_of
from rl4llm.compose import build_algorithm, build_trainer
from rl4llm.compose.data import stored_rows
from rl4llm.compose.setup import Given
from rl4llm.config import Config, load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.tables import GENERATED
from rl4llm.core.types import Trajectory
from rl4llm.data.overlap import overlap_warnings
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout, RolloutResult
from rl4llm.extensions.evaluate.scores import Problem, problems_of
from rl4llm.runs.checkpoint import Checkpoint, latest_checkpoint
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime.threads import repeated
from rl4llm.tracking.summary import summarize
from rl4llm.trainers.rl import RLTrainer

PLAIN = {"name": "reinforce_pp"}
"""A method that needs the policy alone: no critic, no reference, no groups."""

REPORT_S = 15.0  # between two lines about the progress of an evaluation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of a model on held-out prompts: `metrics` as a run logs them, each problem, and all its episodes.

    `model` is the checkpoint that was measured, or `model.path`.
    """

    model: str
    step: int | None  # None for a model that is measured apart from any run
    samples: int
    temperature: float
    seed: int
    metrics: dict[str, float]
    problems: list[Problem]
    played: RolloutResult

    def about(self) -> dict[str, Any]:
        """Return what was measured, and how."""
        return {name: getattr(self, name) for name in ("model", "step", "samples", "temperature", "seed")}


def load(path: str, overrides: Sequence[str], *, of_run: bool = False) -> Config:
    """Return the configuration of a file. The config.yaml of a run means that run, even if its directory has moved.

    With `of_run` it may lack environment variables, see `load_config`.
    """
    beside = RunDir(Path(path).parent)
    if Path(path) == beside.config_file and beside.run_file.is_file():
        overrides = [f"output.dir={beside.path}", *overrides]
    return load_config(path, overrides, of_run=of_run)


def evaluate(
    config: Config, samples: int = 1, given: Given | None = None, *, of_run: bool = True
) -> Evaluation:
    """Play `samples` episodes for each held-out prompt, by the run's last checkpoint or, without one, by `model.path`.

    It reads only the held-out set, and loads nothing that only training needs. The same configuration plays the same
    episodes of the same step. Without `of_run`, the model is that of `model.path`, and no run is read. Objects that are
    `given` replace what the configuration names. Raise ConfigError for a setup that cannot be evaluated.
    """
    if samples > 1 and config.eval.temperature == 0:
        raise ConfigError(
            f"--samples {samples} at eval.temperature=0 would give the same answer {samples} times. Next: use one sample, "
            "or set a temperature, such as eval.temperature=0.8."
        )
    learns_from = "episodes" if given else _learns_from(config)
    checkpoint = _checkpoint(config) if of_run else None
    with at_work(_only_held_out(config), checkpoint, given) as trainer, _reporting(trainer):
        if given is None and learns_from == "episodes":
            _compare_rows(config, trainer.evaluation)
        result = trainer.play_held_out(samples)
        step = trainer.step if of_run else None
    return Evaluation(
        model=str(checkpoint.path) if checkpoint else config.model.path,
        step=step,
        samples=samples,
        temperature=config.eval.temperature,
        seed=config.seed,
        metrics=summarize(result.groups, result.failed),
        problems=problems_of(result.groups, result.failed),
        played=result,
    )


def collect(config: Config, prompts: int) -> Generator[Trajectory]:
    """Yield `rollout.group_size` episodes for each of `prompts` prompts, sampled as in training and in its order.

    The policy is the run's last checkpoint or, without one, `model.path`. Failed samples are left out; too many of
    them raise TooManyFailuresError, as in training. A prompt that comes again gets other seeds.
    """
    played: Counter[int] = Counter()
    with at_work(replace(config, eval=replace(config.eval, every=0)), _checkpoint(config)) as trainer:
        for begin in range(0, prompts, trainer.prompts.batch_size):
            rows = trainer.prompts.next_batch(min(trainer.prompts.batch_size, prompts - begin))
            result = trainer.rollout.play(
                rows, step=trainer.step, sampling_params=trainer.sampling_params, earlier=played
            )
            played.update(rows)
            yield from result.trajectories


def _checkpoint(config: Config) -> Checkpoint | None:
    """Return the last checkpoint of the run in `output.dir`, and print which model will play."""
    run = RunDir(config.output.dir)
    checkpoint = latest_checkpoint(run.checkpoints_dir)
    if checkpoint is None:
        say(f"{run.path} has no checkpoint, so model.path={config.model.path} plays.")
    else:
        say(f"{checkpoint.path} plays.")
    return checkpoint


@contextmanager
def at_work(config: Config, checkpoint: Checkpoint | None, given: Given | None = None) -> Iterator[RLTrainer]:
    """Yield a trainer with the weights of a checkpoint or, without one, of `model.path`, published to its engine.

    The run's files stay unchanged, so this works while the run trains, except through the same server.
    """
    config = replace(config, max_steps=0)  # nothing trains
    with scratch_of(config) as config, build_trainer(config, given) as trainer:
        if not isinstance(trainer, RLTrainer):
            raise ConfigError(
                f"algorithm.name={config.algorithm['name']!r} does not sample, so there are no episodes."
            )
        if checkpoint is not None:
            trainer.backend.load(checkpoint.path / "model")
            trainer.step = checkpoint.state["step"]
        trainer.publish()
        yield trainer


@contextmanager
def _reporting(trainer: RLTrainer) -> Iterator[None]:
    """Print now and then how many episodes are finished, to standard error."""
    began = time.monotonic()

    def report() -> None:
        held_out = trainer.evaluation
        rollouts = held_out.parts if isinstance(held_out, MixedRollout) else [held_out] if held_out else []
        if samples := [sample for rollout in rollouts for sample in rollout.playing]:
            finished = sum(sample.done for sample in samples)
            say(f"{finished} of {len(samples)} episodes finished, {time.monotonic() - began:.0f} s")

    with repeated(REPORT_S, report, "rl4llm-eval-progress"):
        yield


def _only_held_out(config: Config) -> Config:
    """Return the configuration of a run that only reads the held-out prompts and does not train."""
    config = replace(config, algorithm=PLAIN, eval=replace(config.eval, every=max(1, config.eval.every)))
    if config.parts:
        return config
    data = replace(config.data, split=config.eval.split, limit=config.eval.limit)
    return replace(config, data=replace(data, path=config.eval.path or config.data.path))


def _compare_rows(config: Config, held_out: Rollout | MixedRollout | None) -> None:
    """Print how many of the held-out prompts are also in training data on this machine, as a run does at its start."""
    data = config.data
    if isinstance(held_out, Rollout) and config.eval.path and os.path.exists(data.path or ""):
        try:
            rows = stored_rows(config, data.path, data.split, data.limit, "episodes")
            for line in overlap_warnings(rows, held_out.env.dataset, "eval"):
                say(line)
        except (ConfigError, DataError, OSError) as error:
            say(f"data.path is not compared with eval.path: {error}")


def _learns_from(config: Config) -> str:
    """Return what the method learns from; raise ConfigError if its model gives no answers."""
    needs = build_algorithm(config).needs()
    if needs.value_head:
        raise ConfigError(
            f"algorithm.name={config.algorithm['name']!r} trains a reward/value model, which cannot generate completions. "
            "Its held-out numbers are in eval.jsonl of its run."
        )
    rows = config.eval.path or config.data.path
    if needs.learns_from != "episodes" and not config.eval.path and rows not in (None, *GENERATED):
        raise ConfigError(
            f"data.path={rows!r} is for training by {needs.learns_from}. Next: eval.path=PROMPTS_WITH_GROUND_TRUTH and "
            "rewards=[...], with data.prompt_column and data.answer_column of that file."
        )
    return needs.learns_from
