"""What the descriptions of several commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl4llm.commands import completers

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
    about = "a YAML file; configs/NAME.yaml, if not here, is the one that rl4llm brings"
    _completed(command.add_argument("config", help=about), completers.configurations)
    add_overrides(command, "key.sub=value", "changes to keys, or YAML files to be laid over the first")


def add_overrides(command: argparse.ArgumentParser, metavar: str, about: str) -> None:
    """The argument `overrides`, which may also stand behind options."""
    _completed(command.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=about), completers.overrides)


def _completed(argument: Any, completer: Callable[..., Iterable[str]]) -> None:
    """Have a shell offer what `completer` finds; the attribute is argcomplete's."""
    argument.completer = completer


def add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="go on with a run although its configuration changed")


def add_json(command: argparse.ArgumentParser, what: str = "print the result as JSON, for scripts") -> None:
    command.add_argument("--json", action="store_true", help=what)
