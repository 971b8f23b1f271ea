"""``rl4llm export`` writes the model of a run as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_json, add_overrides
from rl4llm.commands.output import show, write_json


def add(commands: Any) -> None:
    examples = (
        "rl4llm export runs/quickstart/grpo --out models/calculator",
        "rl4llm export runs/x --out models/x --step 20",
    )
    about = "write a run's model as a Hugging Face directory, with a model card"
    command = add_command(commands, "export", run, about, examples)
    command.add_argument("run_dir", type=Path, metavar="RUN", help="the output.dir of a run")
    command.add_argument("--out", required=True, type=Path, help="output directory (must not exist)")
    command.add_argument("--step", type=int, help="step of the checkpoint to export (default: latest)")
    merge = "merge the adapter into a base in 4 bits too, in model.dtype (default: the adapter alone)"
    command.add_argument("--merge", action="store_true", help=merge)
    add_overrides(command, "key.sub=value", "override a key, such as a model.path that has moved")
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.export.export import export

    notes: list[str] = []
    options = {"step": arguments.step, "overrides": arguments.overrides, "merge": arguments.merge}
    checkpoint = export(arguments.run_dir, arguments.out, **options, note=notes.append)
    if arguments.json:
        write_json({"out": str(arguments.out), "step": checkpoint.step, "notes": notes})
    else:
        show(f"The model after step {checkpoint.step} is in {arguments.out}", *notes)
    return 0
