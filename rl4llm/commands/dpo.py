"""``rl4llm dpo``: train on what was preferred."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.train import train_method

PREFERENCES = ("pairs", "labels")


def add(commands: Any) -> None:
    examples = (
        "rl4llm dpo configs/dpo.yaml model.path=runs/sft data.path=preferences.jsonl eval.every=0",
        "rl4llm dpo configs/dpo.yaml algorithm.name=kto data.path=labelled.jsonl eval.every=0",
    )
    about = "train on preferences: DPO, IPO, KTO, reward models"
    command = add_command(commands, "dpo", run, about, examples, resumes=True)
    add_config(command)
    add_force(command)


def run(arguments: argparse.Namespace) -> int:
    return train_method(arguments, "dpo", "preferences", PREFERENCES)
