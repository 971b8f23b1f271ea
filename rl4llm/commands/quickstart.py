"""``rl4llm quickstart``: from nothing to a learning curve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import STOPPED, say, show


def add(commands: Any) -> None:
    about = "build a small model here, warm it up, train it with GRPO; minutes on a CPU"
    examples = ("rl4llm quickstart", "rl4llm quickstart --dir runs/other --seed 0")
    command = add_command(commands, "quickstart", run, about, examples, resumes=True)
    command.add_argument("--dir", default="runs/quickstart", help="where everything goes (default: %(default)s)")
    command.add_argument("--seed", type=int, default=42, help="of model, data and samples (default: %(default)s)")
    command.add_argument("--configs", type=Path, help="where quickstart*.yaml lie (default: those of rl4llm)")


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.config import CONFIGS

    say("About six minutes on a CPU, once torch is imported. Ctrl-C stops cleanly; the same command goes on.")
    from rl4llm.quickstart.run import quickstart

    finished = quickstart(Path(arguments.dir), seed=arguments.seed, configs=arguments.configs or CONFIGS)
    if not finished:
        show("Stopped and saved. The same command goes on.")
        return STOPPED
    return 0
