"""``rl4llm train``: train as a configuration says, with any method."""

from __future__ import annotations

import argparse
from shlex import quote
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force, add_sweep
from rl4llm.commands.output import STOPPED, say, show


def add(commands: Any) -> None:
    examples = (
        "rl4llm train configs/quickstart.yaml model.path=runs/quickstart/warm",
        "rl4llm train configs/gsm8k_grpo.yaml training.lr=2e-6 output.dir=runs/slower",
        "rl4llm train configs/gsm8k_grpo.yaml --sweep training.lr=1e-6,1e-5 algorithm.kl_coef=0,0.01",
        "rl4llm train configs/sft.yaml model.path=models/base data.path=conversations.jsonl eval.every=0",
        "rl4llm train configs/dpo.yaml model.path=runs/sft data.path=preferences.jsonl eval.every=0",
    )
    about = "train as a configuration says; run it again to resume"
    command = add_command(commands, "train", run, about, examples, resumes=True)
    add_config(command)
    add_force(command)
    add_sweep(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config

    if arguments.sweep:
        from rl4llm.commands.sweep import sweep

        start = ["train", *["--force"] * arguments.force]
        return sweep(arguments.config, arguments.overrides, arguments.sweep, start)

    return train(load_config(arguments.config, arguments.overrides), arguments.force)


def train(config: Any, force: bool) -> int:
    """Train a configuration, or resume its run; return the exit code, which is `STOPPED` after a signal."""
    from rl4llm.compose import build_trainer
    from rl4llm.compose.choices import nobody_starts
    from rl4llm.runtime.cpu import set_aside_what_stays

    with build_trainer(config, force=force) as trainer:
        if trainer.ranks.is_first and (missed := nobody_starts(config, trainer.ranks.size)):
            say(missed)
        set_aside_what_stays()
        trainer.train()
        trainer.ranks.wait()
        trainer.ranks.close()
    if trainer.stopped and trainer.ranks.is_first:
        show(f"Stopped after step {trainer.step} and saved. The same command resumes the run.")
        return STOPPED
    if trainer.ranks.is_first and trainer.updates and not trainer.updates[True]:
        say(
            "Warning: no update since this start changed the weights: there was nothing to learn from, or training.lr is "
            "so low that it was rounded away. `rl4llm check CONFIG --task` shows rewards of samples and what groups teach."
        )
    if trainer.ranks.is_first and config.output.console != "quiet":
        show(
            f"Done. The model is in {trainer.run.model_dir}; `rl4llm view {quote(str(trainer.run.path))}` shows the run."
        )
    return 0
