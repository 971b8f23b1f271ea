"""``rl4llm replay``: recompute a step that was not finite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import show_facts


def add(commands: Any) -> None:
    about = "recompute a step whose loss or gradient was not finite, and show where it first went wrong"
    command = add_command(commands, "replay", run, about, ("rl4llm replay runs/x/failed/step-000012",))
    command.add_argument("step", help="directory of the failed step, such as runs/NAME/failed/step-000012")
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.inspect.replay.replay import replay

    show_facts(replay(Path(arguments.step)), arguments.json)
    return 0
