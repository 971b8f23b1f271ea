"""Measuring a model on the held-out set of a configuration, without training it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rl4llm.build import build_trainer
from rl4llm.config import Config
from rl4llm.core.checkpoint import latest_checkpoint
from rl4llm.core.errors import ConfigError
from rl4llm.tracking.summary import summarize
from rl4llm.trainers.rl import RLTrainer


def evaluate(config: Config) -> dict[str, float]:
    """Metrics of greedy episodes on the held-out set, by the run's last checkpoint or, without one, by `model.path`.

    Nothing is written into the run's directory, so a run can be measured while it trains.
    """
    if config.eval.every == 0:
        config = replace(config, eval=replace(config.eval, every=1))
    checkpoint = latest_checkpoint(Path(config.output.dir) / "checkpoints")
    with tempfile.TemporaryDirectory() as scratch:
        config = replace(config, output=replace(config.output, dir=scratch))
        with build_trainer(config) as trainer:
            if not isinstance(trainer, RLTrainer) or trainer.evaluation is None:
                raise ConfigError("This configuration samples nothing, so there is nothing to evaluate.")
            if checkpoint is not None:
                trainer.backend.load(checkpoint.path / "model")
                trainer.step = checkpoint.state["step"]
            trainer.publish()
            result = trainer.play_held_out()
            return {"step": float(trainer.step), **summarize(result.groups, result.failed)}
