"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl4llm.commands import completers
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry

Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, run: Run, about: str, examples: Sequence[str], *, resumes: bool = False
) -> argparse.ArgumentParser:
    """Add a command that calls `run`; `about` is its line in the list of commands.

    `resumes` is whether the same command resumes an interrupted one.
    """
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # No default, so that `rl4llm --debug COMMAND` keeps its value.
    command.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors"
    )
    command.set_defaults(run=run, resumes=resumes)
    return command


def add_registered(commands: Any, table: Registry[Any], only: str = "") -> None:
    """Add the commands of a table, or `only` one; a package that is broken or not installed raises when it is run."""
    names = {**dict.fromkeys(table), **table.extras}
    for name in [only] if only in names else names:
        try:
            command = table[name]
        except ConfigError:
            listed = {"help": "(its package is broken)"} if name in table else {}
            refused = commands.add_parser(name, add_help=False, prefix_chars="\0", **listed)
            refused.set_defaults(run=lambda _, name=name: table[name], resumes=False, debug=False)
            refused.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
        else:
            command.add(commands)


def add_config(
    command: argparse.ArgumentParser,
    about: str = "path to a YAML file, or configs/NAME.yaml for a bundled one",
) -> None:
    """Add the arguments `config` and `overrides` of `rl4llm.config.load_config`."""
    _completed(command.add_argument("config", help=about), completers.configurations)
    add_overrides(command, "key.sub=value", "override a key; a further YAML file is merged over the first")


def add_overrides(command: argparse.ArgumentParser, metavar: str, about: str) -> None:
    """Add the argument `overrides`, which may also follow options."""
    _completed(
        command.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=about),
        completers.overrides,
    )


def _completed(argument: Any, completer: Callable[..., Iterable[str]]) -> None:
    """Let a shell complete the argument with `completer`; argcomplete reads the attribute."""
    argument.completer = completer


def add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="resume even if the configuration changed")


def add_sweep(command: argparse.ArgumentParser) -> None:
    """Add the option of `rl4llm.commands.sweep`."""
    command.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        metavar="KEY=V1,V2",
        help="a run for each combination of values, one after another, in directories of output.dir",
    )


def add_json(command: argparse.ArgumentParser, what: str = "print the result as JSON, for scripts") -> None:
    command.add_argument("--json", action="store_true", help=what)
