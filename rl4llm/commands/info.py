"""``rl4llm info``: what is installed, and what the names in a configuration may be."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import show_facts


def add(commands: Any) -> None:
    about = "versions, devices, and what the names in a configuration may be"
    command = add_command(commands, "info", run, about, ("rl4llm info", "rl4llm info rewards --json"))
    command.add_argument("topic", nargs="?", choices=("algorithms", "environments", "rewards"), help="only this table")
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.info import facts

    show_facts(facts(arguments.topic), arguments.json)
    return 0
