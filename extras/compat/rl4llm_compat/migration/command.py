"""``rl4llm import`` converts a command or configuration of verl."""

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
    )
    about = "convert a command or configuration of verl"
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
    from rl4llm_compat.migration.convert import convert
    from rl4llm_compat.migration.read import read
    from rl4llm_compat.migration.rules import DataFacts

    out = arguments.out
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists. Next: remove it, or choose another file.")
    if out is not None and not out.absolute().parent.is_dir():
        raise RunDirError(f"{out} cannot be written: the directory {out.parent} does not exist.")
    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows} is not accepted. Accepted: 1 or more.")
    made = convert(read(arguments.source), DataFacts(arguments.rows))
    text = made.text(f"Converted from verl by `rl4llm import`. Train with: rl4llm train {out or 'FILE'}")
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
        counts = f"{len(made.keys)} keys, {len(made.without)} without a counterpart"
        say(f"Wrote {out}: {counts}, {len(made.open)} to be decided. Each line says what it was.")
    _check(text)
    return 0


def _check(text: str) -> None:
    """Raise ConfigError if the configuration is not accepted, as `rl4llm train` does before it loads anything."""
    from rl4llm.compose import Given, build_algorithm
    from rl4llm.compose.choices import check_choices
    from rl4llm.config import Config, load_config
    from rl4llm.config.overrides import read_yaml

    try:
        config = load_config(None, read_yaml(text, Config))
        check_choices(config, Given(), build_algorithm(config).needs())
    except ConfigError as error:
        raise ConfigError(f"The converted configuration needs a change: {error}") from error
