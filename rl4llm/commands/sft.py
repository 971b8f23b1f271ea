"""``rl4llm sft``: train on what was said."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.train import train_method

CONVERSATIONS = ("demonstrations", "worlds", "conversations")


def add(commands: Any) -> None:
    examples = (
        "rl4llm sft configs/sft.yaml model.path=models/base data.path=conversations.jsonl eval.every=0",
        "rl4llm sft configs/sft.yaml data.path=good.jsonl eval.every=0 algorithm.learn=all",
    )
    about = "train on conversations: fine-tuning, world models"
    command = add_command(commands, "sft", run, about, examples, resumes=True)
    add_config(command)
    add_force(command)


def run(arguments: argparse.Namespace) -> int:
    return train_method(arguments, "sft", "conversations", CONVERSATIONS)
