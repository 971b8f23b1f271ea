"""A model at work without being trained: measured on the held-out set of a configuration, or playing episodes to keep."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rl4llm.build import build_trainer, server_urls
from rl4llm.config import Config
from rl4llm.core.checkpoint import latest_checkpoint
from rl4llm.core.errors import ConfigError, RunDirError
from rl4llm.core.types import Trajectory
from rl4llm.tracking.summary import summarize
from rl4llm.trainers.rl import RLTrainer


def evaluate(config: Config) -> dict[str, float]:
    """Metrics of greedy episodes on the held-out set, by the run's last checkpoint or, without one, by `model.path`."""
    if config.eval.every == 0:
        config = replace(config, eval=replace(config.eval, every=1))
    with _at_work(config) as trainer:
        if trainer.evaluation is None:
            raise ConfigError("This configuration has no held-out set, so there is nothing to evaluate on.")
        result = trainer.play_held_out()
        return {"step": float(trainer.step), **summarize(result.groups, result.failed)}


def collect(config: Config, prompts: int) -> Iterator[Trajectory]:
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
