"""``rl4llm quickstart``: train a small model, or with --real a pretrained one, and plot its learning curve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import STOPPED, say, show
from rl4llm.core.errors import ConfigError

REAL, TOY = Path("runs/real"), Path("runs/quickstart")
RESUMES = "Ctrl-C stops cleanly; the same command resumes."


def add(commands: Any) -> None:
    about = "train a small model, or a pretrained one, with GRPO; minutes on a CPU"
    examples = (
        "rl4llm quickstart",
        "rl4llm quickstart --dir runs/other --seed 0",
        "rl4llm quickstart --real",
    )
    command = add_command(commands, "quickstart", run, about, examples, resumes=True)
    command.add_argument(
        "--real", action="store_true", help="download SmolLM2-135M-Instruct, and train it to solve sums"
    )
    command.add_argument(
        "--model", type=Path, help="with --real: directory of a model to train instead of the downloaded one"
    )
    command.add_argument("--dir", type=Path, help=f"output directory (default: {TOY}, with --real {REAL})")
    command.add_argument(
        "--seed", type=int, default=0, help="seed of model, data and sampling (default: %(default)s)"
    )
    command.add_argument(
        "--configs", type=Path, help="directory with the configurations (default: the bundled ones)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is not None and not arguments.real:
        raise ConfigError("--model requires --real.")
    from rl4llm.extensions.quickstart.directory import check_directory

    directory = arguments.dir or (REAL if arguments.real else TOY)
    check_directory(directory, arguments.seed, real=arguments.real)
    finished = _real(arguments) if arguments.real else _toy(arguments)
    if not finished:
        show("Stopped and saved. The same command resumes.")
        return STOPPED
    return 0


def _real(arguments: argparse.Namespace) -> bool:
    say(f"10 to 30 minutes on a CPU, and 4 GB of disk. {RESUMES}")
    from rl4llm.config import CONFIGS
    from rl4llm.extensions.quickstart.real import quickstart_real

    return quickstart_real(
        arguments.dir or REAL,
        seed=arguments.seed,
        configs=arguments.configs or CONFIGS,
        model=arguments.model,
    )


def _toy(arguments: argparse.Namespace) -> bool:
    say(f"About six minutes on a CPU, once torch is imported. {RESUMES}")
    from rl4llm.config import CONFIGS
    from rl4llm.extensions.quickstart.run import quickstart

    return quickstart(arguments.dir or TOY, seed=arguments.seed, configs=arguments.configs or CONFIGS)
