"""Measuring a model on the held-out set of a configuration, without training it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rl4llm.build import build_trainer, server_urls
from rl4llm.config import Config
from rl4llm.core.checkpoint import latest_checkpoint
from rl4llm.core.errors import ConfigError
from rl4llm.tracking.summary import summarize
from rl4llm.trainers.rl import RLTrainer


def evaluate(config: Config) -> dict[str, float]:
    """Metrics of greedy episodes on the held-out set, by the run's last checkpoint or, without one, by `model.path`.

    The run's own files stay as they are, so a run can be measured while it trains, but not through the same server: the
    weights would be replaced, which raises EngineError. Servers read them beside the run's own, where they can.
    """
    if config.eval.every == 0:
        config = replace(config, eval=replace(config.eval, every=1))
    checkpoint = latest_checkpoint(Path(config.output.dir) / "checkpoints")
    shared = _existing(Path(config.sync.dir or config.output.dir)) if server_urls(config) else None
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=shared) as scratch:
        config = replace(config, output=replace(config.output, dir=scratch), sync=replace(config.sync, dir=None))
        with build_trainer(config) as trainer:
            if not isinstance(trainer, RLTrainer) or trainer.evaluation is None:
                raise ConfigError("This configuration samples nothing, so there is nothing to evaluate.")
            if checkpoint is not None:
                trainer.backend.load(checkpoint.path / "model")
                trainer.step = checkpoint.state["step"]
            trainer.publish()
            result = trainer.play_held_out()
            return {"step": float(trainer.step), **summarize(result.groups, result.failed)}


def _existing(directory: Path) -> Path:
    """The directory or, before it is there, the nearest one that it would be in."""
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
