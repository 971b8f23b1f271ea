"""``rl4llm import`` converts a command or configuration of another project."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import say
from rl4llm.core.errors import ConfigError, RunDirError


def add(commands: Any) -> None:
    examples = (
        "rl4llm import run_qwen3_4b_fsdp.sh --out qwen3.yaml",
        "rl4llm import 'python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=M'",
        "rl4llm import configs/grpo_config.yaml --out grpo.yaml",
    )
    about = "convert a command or configuration of verl, TRL or michaelnny/rl4llm"
    command = add_command(commands, "import", run, about, examples)
    command.add_argument(
        "source", metavar="COMMAND_OR_YAML", help="a YAML file, a script, or a quoted command"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="write the configuration (default: print it)"
    )
    command.add_argument(
        "--rows", type=int, metavar="N", help="rows of the dataset, which turn epochs into steps"
    )


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.migration.check import check
    from rl4llm.extensions.migration.convert import convert
    from rl4llm.extensions.migration.read import read
    from rl4llm.extensions.migration.row import DataFacts

    out = arguments.out
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists. Next: remove it, or choose another file.")
    if out is not None and not out.absolute().parent.is_dir():
        raise RunDirError(f"{out} cannot be written: the directory {out.parent} does not exist.")
    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows} is not accepted. Accepted: 1 or more.")
    source = read(arguments.source)
    made = convert(source.project, source.values, DataFacts(arguments.rows))
    text = made.text(
        f"Converted from {source.project.name} by `rl4llm import`. Train with: rl4llm train {out or 'FILE'}"
    )
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
        counts = f"{len(made.keys)} keys, {len(made.without)} without a counterpart"
        say(f"Wrote {out}: {counts}, {len(made.open)} to be decided. Each line says what it was.")
    check(text)
    return 0
