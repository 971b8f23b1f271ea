"""What the descriptions of several commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, run: Run, about: str, examples: Sequence[str], *, resumes: bool = False
) -> argparse.ArgumentParser:
    """A command that `run` does; `about` is its line in the list of commands.

    `resumes` says that the same command goes on where one that was stopped ended.
    """
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without a default of its own, so that one before the command's name stays.
    command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of errors")
    command.set_defaults(run=run, resumes=resumes)
    return command


def add_config(command: argparse.ArgumentParser) -> None:
    """The arguments `config` and `overrides`, as `rl4llm.config.load_config` takes them."""
    command.add_argument("config", help="a YAML file")
    command.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="changes to keys, or YAML files to be laid over the first"
    )


def add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="go on with a run although its configuration changed")


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for scripts, and nothing else to standard output")
