"""``rl4llm serve``: start an inference server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rl4llm.core.registry import load

TINKER = "rl4llm.extensions.tinker.command:run"


def add(commands: Any) -> None:
    # No prefix starts an option, so all that follows is passed to `serve`, which parses it.
    command = commands.add_parser(
        "serve", help="start an inference server", add_help=False, prefix_chars="\0"
    )
    command.add_argument("flags", nargs="*")
    command.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    if arguments.flags[:1] == ["tinker"]:
        serve_tinker: Callable[[Sequence[str]], int] = load(TINKER, "rl4llm serve tinker")
        return serve_tinker(arguments.flags[1:])
    from rl4llm.extensions.servers.launch import serve

    return serve(arguments.flags)
