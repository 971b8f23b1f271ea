"""``rl4llm recipe quickstart``: train a small model, and plot its learning curve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import STOPPED, say, show


def add(actions: Any) -> None:
    about = "build a small model, and train it with GRPO; minutes on a CPU"
    examples = (
        "rl4llm recipe quickstart",
        "rl4llm recipe quickstart --async",
        "rl4llm recipe quickstart --dir runs/other --seed 0",
    )
    command = add_command(actions, "quickstart", run, about, examples, resumes=True)
    command.add_argument(
        "--dir", type=Path, default=Path("runs/quickstart"), help="output directory (default: %(default)s)"
    )
    about = "sample in a separate process while training (rollout.max_staleness=1), on two cores"
    command.add_argument("--async", dest="asynchronous", action="store_true", help=about)
    command.add_argument(
        "--seed", type=int, default=0, help="seed of model, data and sampling (default: %(default)s)"
    )
    command.add_argument(
        "--configs", type=Path, help="directory with the configurations (default: the bundled ones)"
    )


def run(arguments: argparse.Namespace) -> int:
    say("About six minutes on a CPU, once torch is imported. Ctrl-C stops cleanly; the same command resumes.")
    from rl4llm.config import CONFIGS
    from rl4llm.extensions.quickstart.run import quickstart

    how = {"seed": arguments.seed, "asynchronous": arguments.asynchronous}
    if not quickstart(arguments.dir, configs=arguments.configs or CONFIGS, **how):
        show("Stopped and saved. The same command resumes.")
        return STOPPED
    return 0
