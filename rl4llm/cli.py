"""The command line: ``rl4llm train configs/x.yaml training.lr=1e-5``. Each command is a module of `rl4llm.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from rl4llm import __version__
from rl4llm.commands import (
    check,
    collect,
    evaluate,
    export,
    info,
    launch,
    plan,
    quickstart,
    replay,
    serve,
    serve_env,
    train,
    view,
)
from rl4llm.commands.output import STOPPED, say
from rl4llm.core.errors import ConfigError, EnginesDownError, HostsDownError, RL4LLMError

COMMANDS = (
    quickstart,
    plan,
    check,
    train,
    launch,
    evaluate,
    collect,
    export,
    view,
    replay,
    serve,
    serve_env,
    info,
)
"""In the order of ``rl4llm --help``."""

GOES_ON = "The same command goes on from the last checkpoint."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 75 stopped and resumable, 130 broken off, 1 or 2 an error."""
    arguments = _parsed(argv)
    try:
        return arguments.run(arguments)
    except RL4LLMError as error:
        if arguments.resumes and isinstance(error, EnginesDownError | HostsDownError):
            say(f"{error}\n{GOES_ON}")
            return STOPPED
        if arguments.debug:
            raise
        _complain(error)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        say(f"Stopped at once. {GOES_ON}" if arguments.resumes else "Stopped.")
        return 130


def _complain(error: RL4LLMError) -> None:
    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
    say(str(error))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not take."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All commands with their arguments; nothing heavy is imported for it."""
    parser = argparse.ArgumentParser(
        prog="rl4llm",
        description="Reinforcement learning for language models.",
        epilog="`rl4llm COMMAND --help` shows a command's arguments and examples.",
    )
    parser.add_argument("--version", action="version", version=f"rl4llm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")
    # DeepSpeed's launcher puts it before everything else; the environment variable LOCAL_RANK says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def console_script() -> None:
    """The entry point of the `rl4llm` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
