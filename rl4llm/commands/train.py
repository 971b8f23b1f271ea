"""``rl4llm train``, and ``rl4llm sft`` and ``rl4llm dpo`` for methods that learn from a dataset."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from shlex import quote
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.output import STOPPED, say, show
from rl4llm.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """A command that trains. One with `learns_from` accepts only methods that learn from one of these."""

    name: str
    about: str
    examples: tuple[str, ...]
    data: str = ""
    learns_from: tuple[str, ...] = ()

    def add(self, commands: Any) -> None:
        """Describe the command and its arguments."""
        command = add_command(commands, self.name, self.run, self.about, self.examples, resumes=True)
        add_config(command)
        add_force(command)

    def run(self, arguments: argparse.Namespace) -> int:
        """Train, or resume the run in `output.dir`; return the exit code."""
        from rl4llm.config import load_config

        config = load_config(arguments.config, arguments.overrides)
        if not self.learns_from:
            return train(config, arguments.force)
        from rl4llm.algorithms import ALGORITHMS
        from rl4llm.compose import build_algorithm

        found = build_algorithm(config).needs().learns_from
        if found not in self.learns_from:
            known = [
                name for name in ALGORITHMS if ALGORITHMS[name]().needs().learns_from in self.learns_from
            ]
            raise ConfigError(
                f"{arguments.config}: algorithm.name={config.algorithm['name']!r} learns from {found}, but "
                f"`rl4llm {self.name}` accepts only methods that learn from {self.data}: {', '.join(known)}. Use "
                "`rl4llm train`, which accepts every method, or choose one of these methods."
            )
        return train(config, arguments.force)


TRAIN = Command(
    "train",
    "train as a configuration says; run it again to resume",
    (
        "rl4llm train configs/quickstart.yaml model.path=runs/quickstart/warm",
        "rl4llm train configs/gsm8k_grpo.yaml training.lr=2e-6 output.dir=runs/slower",
    ),
)
SFT = Command(
    "sft",
    "train on conversations: fine-tuning, world models",
    (
        "rl4llm sft configs/sft.yaml model.path=models/base data.path=conversations.jsonl eval.every=0",
        "rl4llm sft configs/sft.yaml data.path=good.jsonl eval.every=0 algorithm.learn=all",
    ),
    "conversations",
    ("demonstrations", "worlds", "conversations"),
)
DPO = Command(
    "dpo",
    "train on preferences: DPO, IPO, KTO, reward models",
    (
        "rl4llm dpo configs/dpo.yaml model.path=runs/sft data.path=preferences.jsonl eval.every=0",
        "rl4llm dpo configs/dpo.yaml algorithm.name=kto data.path=labelled.jsonl eval.every=0",
    ),
    "preferences",
    ("pairs", "comparisons", "labels"),
)


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
    if trainer.ranks.is_first and config.output.console != "quiet":
        show(
            f"Done. The model is in {trainer.run.model_dir}; `rl4llm view {quote(str(trainer.run.path))}` shows the run."
        )
    return 0
