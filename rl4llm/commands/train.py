"""``rl4llm train``: train as a configuration says."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.output import STOPPED, show


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

    return train(load_config(arguments.config, arguments.overrides), arguments, "train")


def train(config: Any, arguments: argparse.Namespace, command: str) -> int:
    """Train, or go on; told to stop, it saves and says by which `command` it is resumed."""
    from rl4llm.build import build_trainer
    from rl4llm.core.garbage import set_aside_what_stays

    with build_trainer(config, force=arguments.force) as trainer:
        set_aside_what_stays()
        trainer.train()
        trainer.ranks.wait()
        trainer.ranks.close()
    if trainer.stopped and trainer.ranks.is_first:
        words = " ".join(["rl4llm", command, arguments.config, *arguments.overrides])
        show(f"Stopped after step {trainer.step} and saved. Resume with:\n  {words}")
        return STOPPED
    return 0
