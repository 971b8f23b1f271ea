"""``rl4llm train``: train as a configuration says."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from shlex import quote
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.output import STOPPED, say, show
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    examples = (
        "rl4llm train configs/quickstart.yaml model.path=runs/quickstart/warm",
        "rl4llm train configs/gsm8k_grpo.yaml training.lr=2e-6 output.dir=runs/slower",
    )
    about = "train as a configuration says; run it again to resume"
    command = add_command(commands, "train", run, about, examples, resumes=True)
    add_config(command)
    add_force(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config

    return train(load_config(arguments.config, arguments.overrides), arguments)


def train_method(arguments: argparse.Namespace, command: str, what: str, learns_from: Collection[str]) -> int:
    """Train by a method that learns from one of `learns_from`; raises ConfigError for a configuration of another method."""
    from rl4llm.algorithms import ALGORITHMS
    from rl4llm.build import build_algorithm
    from rl4llm.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    found = build_algorithm(config).needs().learns_from
    if found not in learns_from:
        known = [name for name in ALGORITHMS if ALGORITHMS[name]().needs().learns_from in learns_from]
        raise ConfigError(
            f"{arguments.config}: algorithm.name={config.algorithm['name']!r} learns from {found}, and `rl4llm {command}` "
            f"is for methods that learn from {what}: {', '.join(known)}. Next: `rl4llm train`, which takes every method, or "
            "one of those."
        )
    return train(config, arguments)


def train(config: Any, arguments: argparse.Namespace) -> int:
    """Train, or go on; told to stop, it saves and says so."""
    from rl4llm.build import build_trainer
    from rl4llm.core.garbage import set_aside_what_stays
    from rl4llm.launch.roles import nobody_starts

    with build_trainer(config, force=arguments.force) as trainer:
        if trainer.ranks.is_first and (missed := nobody_starts(config)):
            say(missed)
        set_aside_what_stays()
        trainer.train()
        trainer.ranks.wait()
        trainer.ranks.close()
    if trainer.stopped and trainer.ranks.is_first:
        show(f"Stopped after step {trainer.step} and saved. The same command goes on.")
        return STOPPED
    if trainer.ranks.is_first and config.output.console != "quiet":
        show(f"Done. The model is in {trainer.run.model_dir}; `rl4llm view {quote(str(trainer.run.path))}` shows the run.")
    return 0
