"""The command line: ``rl4llm train configs/x.yaml training.lr=1e-5``. `rl4llm.commands` describes commands."""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from rl4llm import __version__
from rl4llm.commands.arguments import add_registered
from rl4llm.commands.output import STOPPED, say
from rl4llm.core.errors import ConfigError, EnginesDownError, HostsDownError, RL4LLMError, unknown
from rl4llm.core.registry import Registry, elsewhere
from rl4llm.runtime.terminal import Terminal, protect_terminal

COMMANDS: Registry[Any] = Registry(
    "rl4llm",
    group="rl4llm.commands",
    table={
        "train": "rl4llm.commands.train",
        "recipe": "rl4llm.commands.recipe",
        "serve": "rl4llm.commands.serve",
    },
    extras={"import": "compat", "run": "compat"},
)
"""Each command is a module, or an object in one, which has `add`."""

INTERRUPTED, UNREAD = 130, 141  # what shells report for SIGINT and SIGPIPE
HELP = ("-h", "--help")
RESUMES = "The same command resumes from the last checkpoint."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    0 is success, 1 an error, 2 an error in the configuration or the arguments. 75 means stopped and resumable, 130
    interrupted by Ctrl-C, and 141 that standard output is a pipe whose reader is gone.
    """
    try:
        arguments = _parsed(argv)
    except KeyboardInterrupt:
        return _interrupted(resumes=False)
    if arguments.debug:
        # This also logs the tracebacks of errors that a run survives.
        logging.getLogger("rl4llm").setLevel(logging.DEBUG)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except (RL4LLMError, OSError, MemoryError, RuntimeError) as error:
        if arguments.debug or not (_of_memory(error) or isinstance(error, RL4LLMError | OSError)):
            raise
        return _complain(error, arguments.resumes)
    except KeyboardInterrupt:
        return _interrupted(arguments.resumes)
    except ImportError as error:
        if not _by_ctrl_c(error):
            raise
        return _interrupted(arguments.resumes)


def _interrupted(resumes: bool) -> int:
    say(f"Stopped at once. {RESUMES}" if resumes else "Stopped.")
    return INTERRUPTED


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error: transformers raises ImportError when its import is interrupted."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _of_memory(error: Exception) -> bool:
    """Return whether the memory of the machine or of a GPU ended. torch has an error for that of GPUs."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _complain(error: Exception, resumes: bool) -> int:
    """Print the error; return the exit code."""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return _unread()
    if resumes and isinstance(error, EnginesDownError | HostsDownError):
        say(f"{error}\n{RESUMES}")
        return STOPPED
    memory = _of_memory(error)
    Terminal(stderr=True).print(f"[bold red]{'MemoryError' if memory else type(error).__name__}[/]: ", end="")
    needed = "Run `rl4llm plan CONFIG` to see how much a step needs."
    say(f"{str(error).partition('. ')[0] or 'Out of memory'}. {needed}" if memory else str(error))
    return 2 if isinstance(error, ConfigError) else 1


def _unread() -> int:
    """Discard the rest of the output; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return UNREAD


def _reader_is_gone() -> bool:
    """Return whether standard output is a pipe whose reader is gone, such as ``| head``."""
    poll = select.poll()
    poll.register(1, 0)  # poll always reports errors
    return bool(poll.poll(0))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; unlike argparse alone, this accepts overrides before and after options."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv[0] in ("help", "version"):
        argv = [*argv[1:], f"--{argv[0]}"]
    parser = build_parser(next((word for word in argv if word in HELP or not word.startswith("-")), ""))
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete  # noqa: PLC0415 - only for completion

        argcomplete.autocomplete(parser, always_complete_options=False)
    arguments, rest = parser.parse_known_args(argv)
    overrides = [_as_override(word) for word in rest]
    options = [word for word in overrides if word.startswith("-")]
    if rest and ("overrides" not in arguments or options):
        answers = filter(None, (elsewhere("key", word.lstrip("-").replace("-", "_")) for word in options))
        parser.error(
            f"unrecognized arguments: {' '.join(rest)}. {next(answers, 'Keys are written as key.sub=value.')}"
        )
    if rest:
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def _as_override(word: str) -> str:
    """Return ``--max-steps=3`` as the override that it means."""
    key, equals, value = word.partition("=")
    return f"{key.lstrip('-').replace('-', '_')}={value}" if equals and word.startswith("--") else word


class _Parser(argparse.ArgumentParser):
    """A parser that answers a misspelled command or choice with the closest one, in all its subparsers."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            where = str(action.metavar or "/".join(action.option_strings) or action.dest)
            raise argparse.ArgumentError(None, unknown(where, str(value), map(str, action.choices)))


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command, or of all without its name; this imports nothing heavy."""
    parser = _Parser(
        prog="rl4llm",
        description="Reinforcement learning for language models. Start with `rl4llm recipe quickstart`.",
        epilog="Run `rl4llm COMMAND --help` for the arguments and examples of a command.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=16),
    )
    parser.add_argument("--version", action="version", version=f"rl4llm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    # DeepSpeed's launcher puts it first; the environment variable LOCAL_RANK has the same value.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_registered(commands, COMMANDS, command)
    return parser


def console_script() -> None:
    """Run the command of this process, and exit."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _open_closed_streams()
    protect_terminal()
    try:
        sys.exit(main())
    finally:
        try:  # here, since Python would print an error at exit when the reader is gone
            sys.stdout.flush()
        except BrokenPipeError:
            sys.exit(_unread())


def _open_closed_streams() -> None:
    """Open closed standard streams (``>&-``) on the null device; otherwise the next opened file would take their place."""
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, mode, closefd=False))
