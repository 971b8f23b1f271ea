"""A model at work without being trained: measured on the held-out set of a configuration, or playing episodes to keep."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rl4llm.build import build_algorithm, build_trainer, server_urls
from rl4llm.build.data import GENERATED
from rl4llm.config import Config
from rl4llm.core.checkpoint import latest_checkpoint
from rl4llm.core.errors import ConfigError, DataError, RunDirError
from rl4llm.core.types import Trajectory
from rl4llm.tracking.scores import Problem, problems_of
from rl4llm.tracking.summary import summarize
from rl4llm.trainers.rl import RLTrainer

PLAIN = {"name": "reinforce_pp"}
"""A method that asks for nothing but the policy: no critic, no reference, no groups."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model did on a held-out set: `metrics` as a run logs them, and each problem with its attempts."""

    model: str
    step: int
    samples: int
    temperature: float
    seed: int
    metrics: dict[str, float]
    problems: list[Problem]


def evaluate(config: Config, samples: int = 1) -> Evaluation:
    """Play `samples` episodes for each held-out prompt, by the run's last checkpoint or, without one, by `model.path`.

    Nothing but the held-out set is read, and nothing that only training needs is loaded. The same configuration plays the
    same episodes of the same step. Raises ConfigError for what cannot be measured.
    """
    if samples < 1:
        raise ConfigError(f"--samples {samples} is not accepted: 1 or above.")
    if samples > 1 and config.eval.temperature == 0:
        raise ConfigError(
            f"--samples {samples} at eval.temperature=0 would be {samples} times the same answer. Next: one sample, or a "
            "temperature, such as eval.temperature=0.8."
        )
    learns_from = _learns_from(config)
    try:
        with _at_work(_only_held_out(config)) as trainer:
            result = trainer.play_held_out(samples)
            metrics, step = summarize(result.groups, result.failed), trainer.step
    except DataError as error:
        if learns_from == "episodes":
            raise
        raise DataError(f"{error}\n{_what_fits(config, learns_from)}") from error
    return Evaluation(
        model=config.model.path,
        step=step,
        samples=samples,
        temperature=config.eval.temperature,
        seed=config.seed,
        metrics=metrics,
        problems=problems_of(result.groups, result.failed),
    )


def collect(config: Config, prompts: int) -> Generator[Trajectory]:
    """Episodes of `rollout.group_size` attempts at each of `prompts` prompts, sampled as in training, in its order.

    The policy is the run's last checkpoint or, without one, `model.path`. Failed attempts are left out; where they are too
    many, TooManyFailuresError ends it, as in training. A prompt whose turn comes again is attempted anew, with other seeds.
    """
    played: Counter[int] = Counter()
    with _at_work(replace(config, eval=replace(config.eval, every=0))) as trainer:
        for begin in range(0, prompts, trainer.prompts.batch_size):
            rows = trainer.prompts.next_batch(min(trainer.prompts.batch_size, prompts - begin))
            result = trainer.rollout.play(rows, step=trainer.step, sampling_params=trainer.sampling_params, earlier=played)
            played.update(rows)
            yield from result.trajectories


@contextmanager
def _at_work(config: Config) -> Iterator[RLTrainer]:
    """A trainer with the run's last checkpoint, published to its engine.

    The run's own files stay as they are, so this can be done while it trains, but not through the same server: the weights
    would be replaced, which raises EngineError. Servers read them beside the run's own, where they can.
    """
    checkpoint = latest_checkpoint(Path(config.output.dir) / "checkpoints")
    with scratch_of(config) as config, build_trainer(config) as trainer:
        if not isinstance(trainer, RLTrainer):
            raise ConfigError(f"algorithm.name={config.algorithm['name']!r} samples nothing: there are no episodes.")
        if checkpoint is not None:
            trainer.backend.load(checkpoint.path / "model")
            trainer.step = checkpoint.state["step"]
        trainer.publish()
        yield trainer


def _only_held_out(config: Config) -> Config:
    """The configuration of a run whose only data are the held-out prompts, and which trains nothing."""
    config = replace(config, algorithm=PLAIN, eval=replace(config.eval, every=max(1, config.eval.every)))
    if config.parts:
        return config
    data = replace(config.data, split=config.eval.split, limit=config.eval.limit)
    return replace(config, data=replace(data, path=config.eval.path or config.data.path))


def _learns_from(config: Config) -> str:
    """What the configuration's method learns from; raises ConfigError where its model says nothing."""
    needs = build_algorithm(config).needs()
    if needs.value_head:
        raise ConfigError(
            f"algorithm.name={config.algorithm['name']!r} trains a model that gives values instead of answers, so there is "
            "nothing to play. Its held-out numbers are in eval.jsonl of its run."
        )
    if needs.learns_from != "episodes" and config.eval.path is None and config.data.path not in (None, *GENERATED):
        raise ConfigError(f"data.path={config.data.path!r} is for training. {_what_fits(config, needs.learns_from)}")
    return needs.learns_from


def _what_fits(config: Config, learns_from: str) -> str:
    return (
        f"algorithm.name={config.algorithm['name']!r} learns from {learns_from}; its model is measured by its answers. "
        "Next: eval.path=PROMPTS_WITH_GROUND_TRUTH and rewards=[...], with data.prompt_column and data.answer_column of "
        "that file."
    )


@contextmanager
def scratch_of(config: Config) -> Iterator[Config]:
    """The configuration with a directory for itself, which is gone afterwards; where servers read weights, one that they
    see. Raises RunDirError where none can be made."""
    shared = existing(Path(config.sync.dir or config.output.dir)) if server_urls(config) else None
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".scratch-", dir=shared)
    except OSError as error:
        raise RunDirError(f"No directory can be made in {shared or tempfile.gettempdir()}: {error.strerror}.") from error
    with scratch as directory:
        yield replace(config, output=replace(config.output, dir=directory), sync=replace(config.sync, dir=None))


def existing(directory: Path) -> Path:
    """The directory or, before it is there, the nearest one that it would be in."""
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
