"""The command line: ``rl4llm train configs/x.yaml training.lr=1e-5``. Each command is a module of `rl4llm.commands`."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from rich.console import Console

from rl4llm import __version__
from rl4llm.commands import (
    check,
    collect,
    completion,
    dpo,
    evaluate,
    export,
    info,
    launch,
    plan,
    quickstart,
    replay,
    serve,
    serve_env,
    sft,
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
    sft,
    dpo,
    launch,
    evaluate,
    collect,
    export,
    view,
    replay,
    serve,
    serve_env,
    info,
    completion,
)
"""In the order of ``rl4llm --help``."""

BROKEN_OFF, UNREAD = 130, 141  # as shells say of SIGINT and SIGPIPE
GOES_ON = "The same command goes on from the last checkpoint."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0 done, 1 or 2 an error (2: in the configuration), 75 stopped and resumable, 130 broken off, 141 nobody reads the output.
    """
    try:
        arguments = _parsed(argv)
    except KeyboardInterrupt:
        return _broken_off(resumes=False)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except (RL4LLMError, OSError, MemoryError) as error:
        if arguments.debug:
            raise
        return _complain(error, arguments.resumes)
    except KeyboardInterrupt:
        return _broken_off(arguments.resumes)
    except ImportError as error:
        if not _by_ctrl_c(error):
            raise
        return _broken_off(arguments.resumes)


def _broken_off(resumes: bool) -> int:
    say(f"Stopped at once. {GOES_ON}" if resumes else "Stopped.")
    return BROKEN_OFF


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether it began with Ctrl-C, of which transformers makes an ImportError while one of its modules is imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _complain(error: RL4LLMError | OSError | MemoryError, resumes: bool) -> int:
    """Say what was wrong; returns the exit code."""
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return _unread()
    if resumes and isinstance(error, EnginesDownError | HostsDownError):
        say(f"{error}\n{GOES_ON}")
        return STOPPED
    memory = isinstance(error, MemoryError)
    Console(stderr=True).print(f"[bold red]{'MemoryError' if memory else type(error).__name__}[/]: ", end="")
    say(f"{str(error) or 'none is left'}. Next: `rl4llm plan CONFIG` says what a step takes." if memory else str(error))
    return 2 if isinstance(error, ConfigError) else 1


def _unread() -> int:
    """Let the rest of the output lead nowhere; returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return UNREAD


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader is gone, such as ``| head``."""
    poll = select.poll()
    poll.register(1, 0)  # errors are always told
    return bool(poll.poll(0))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not take."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how a word could end
        import argcomplete  # noqa: PLC0415 - not before it is asked for

        argcomplete.autocomplete(parser, always_complete_options=False)
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
        description="Reinforcement learning for language models. First: rl4llm quickstart",
        epilog="`rl4llm COMMAND --help` shows a command's arguments and examples.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=16),
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
    """Run the command that the process was started with, and end the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _open_closed_streams()
    try:
        sys.exit(main())
    finally:
        _end_output()


def _end_output() -> None:
    """Write what is still buffered, such as a help text, here; Python would complain about a reader who is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(_unread())


def _open_closed_streams() -> None:
    """Standard streams that were closed (``>&-``) lead nowhere; else the next file that is opened would be one of them."""
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, mode, closefd=False))
