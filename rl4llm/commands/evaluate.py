"""``rl4llm eval``: measure a model on a held-out set."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import show, write_json


def add(commands: Any) -> None:
    examples = (
        "rl4llm eval configs/gsm8k_grpo.yaml",
        "rl4llm eval configs/gsm8k_grpo.yaml output.dir=runs/slower --json",
    )
    about = "measure a model, or a run's last checkpoint, on the held-out set"
    command = add_command(commands, "eval", run, about, examples)
    add_config(command)
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from rl4llm.config import load_config
    from rl4llm.evaluate import evaluate

    numbers = evaluate(load_config(arguments.config, arguments.overrides))
    if arguments.json:
        write_json(numbers)
        return 0
    table = Table("metric", "value", title=f"held-out set, {arguments.config}")
    for name, value in numbers.items():
        table.add_row(name, f"{value:.4g}")
    show(table)
    return 0
