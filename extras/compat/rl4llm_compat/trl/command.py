"""``rl4llm run``: train with a script written for TRL, unchanged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    about = "run a script written for TRL, unchanged, with rl4llm in the place of trl"
    examples = (
        "rl4llm run train.py --model_name_or_path MODEL --learning_rate 1e-5",
        "rl4llm run --no-push train.py --config train.yaml",
    )
    command = add_command(commands, "run", run, about, examples, resumes=True)
    command.add_argument("--no-push", action="store_true", help="skip the script's calls of push_to_hub")
    command.add_argument("script", type=Path, help="the script; every argument after it is the script's")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.script.is_file() or arguments.script.suffix not in ("", ".py"):  # JSON is Python too
        raise ConfigError(f"{arguments.script} is not a file of Python.")
    from rl4llm_compat.trl.run import run_script

    run_script(arguments.script, arguments.arguments, push=not arguments.no_push)
    return 0
