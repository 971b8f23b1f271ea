"""``rl4llm recipe list``: the runs with published results."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import show, write_json


def add(actions: Any) -> None:
    about = "list the recipes and their results"
    add_json(add_command(actions, "list", run, about, ("rl4llm recipe list",)))


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.recipes.recipe import load, names
    from rl4llm.extensions.recipes.results import COLUMNS, rows

    table = [row for name in names() for row in rows(load(name))]
    if arguments.json:
        write_json({"recipes": [dict(zip(COLUMNS, row, strict=True)) for row in table]})
        return 0
    for name, variant, learns, held_out, minutes, memory, place in table:
        if learns:
            show(f"{name}: {learns}")
        facts = [held_out, minutes and f"{minutes} minutes", memory and f"{memory} GB", place]
        show(f"  {variant}: {', '.join(filter(None, facts))}")
    return 0
