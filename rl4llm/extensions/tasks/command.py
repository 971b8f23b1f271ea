"""``rl4llm tasks import``: write rows of SWE-bench or SWE-Gym as task directories."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import show


def add(commands: Any) -> None:
    about = "write task directories from rows of SWE-bench or SWE-Gym"
    tasks = commands.add_parser("tasks", help=about, description=f"{about[0].upper()}{about[1:]}.")
    actions = tasks.add_subparsers(required=True, metavar="ACTION", parser_class=type(tasks))
    command = add_command(
        actions, "import", run, about, ["rl4llm tasks import swe.jsonl --repos mirrors/ --out tasks/"]
    )
    command.add_argument("rows", metavar="ROWS", help="a file of rows, such as .jsonl or .parquet")
    command.add_argument("--repos", required=True, type=Path, metavar="DIR", help="mirrors, DIR/owner/name")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory for the tasks")
    about = "image with the packages of the repositories (default: %(default)s)"
    command.add_argument("--image", default="host", help=about)
    about = "starts pytest in the image (default: %(default)s)"
    command.add_argument("--command", default="python3 -m pytest", metavar="WORDS", help=about)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.tasks.swe import Importer

    importer = Importer(arguments.repos, arguments.out, arguments.image, arguments.command)
    count = importer.write_all(arguments.rows)
    show(f"{count} tasks are in {arguments.out}. Next: rl4llm check CONFIG --task data.path={arguments.out}")
    return 0
