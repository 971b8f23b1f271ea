"""``rl4llm serve``: start an inference server, or ``rl4llm serve tinker`` another kind of server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rl4llm.commands.output import show
from rl4llm.core.registry import Registry, from_extension

KINDS: Registry[Callable[[Sequence[str]], int]] = Registry(
    "rl4llm serve", group="rl4llm.servers", extras={"tinker": "tinker"}
)
"""Other kinds of servers by the first word after ``serve``; each is called with the words that follow."""


def add(commands: Any) -> None:
    # No prefix starts an option, so all that follows is passed to the server's own parser.
    command = commands.add_parser(
        "serve", help="start an inference server", add_help=False, prefix_chars="\0"
    )
    command.add_argument("flags", nargs="*")
    command.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    kind, words = arguments.flags[:1], arguments.flags[1:]
    if kind and (kind[0] in KINDS or kind[0] in KINDS.extras):
        return KINDS[kind[0]](words)
    if {"-h", "--help"} & {*kind}:
        show(*(f"rl4llm serve {name} --help" for name in sorted({*KINDS, *KINDS.extras})), "")
    serve: Callable[[Sequence[str]], int] = from_extension("serve", "rl4llm serve")
    return serve(arguments.flags)
