"""``rl4llm quickstart``: from nothing to a learning curve."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import STOPPED, show


def add(commands: Any) -> None:
    about = "build a small model here, warm it up, train it with GRPO"
    examples = ("rl4llm quickstart", "rl4llm quickstart --dir runs/other --seed 0")
    command = add_command(commands, "quickstart", run, about, examples, resumes=True)
    command.add_argument("--dir", default="runs/quickstart", help="where everything goes (default: %(default)s)")
    command.add_argument("--seed", type=int, default=42)
    command.add_argument("--configs", type=Path, help="where quickstart*.yaml lie (default: those of rl4llm)")


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.quickstart.run import CONFIGS, quickstart

    finished = quickstart(Path(arguments.dir), seed=arguments.seed, configs=arguments.configs or CONFIGS)
    if not finished:
        command = " ".join(["rl4llm", *sys.argv[1:]])
        show(f"Stopped and saved. Resume with:\n  {command}")
        return STOPPED
    return 0
