"""``rl4llm serve``: start an inference server."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    # No prefix starts an option here, so all that follows goes to the launcher, which knows its own options.
    command = commands.add_parser("serve", help="start an inference server", add_help=False, prefix_chars="\0")
    command.add_argument("flags", nargs="*")
    command.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.inference.launch import serve

    return serve(arguments.flags)
