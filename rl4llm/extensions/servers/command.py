"""``rl4llm serve``: start an inference server."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    # No prefix starts an option, so all that follows is passed to `serve`, which parses it.
    command = commands.add_parser(
        "serve", help="start an inference server", add_help=False, prefix_chars="\0"
    )
    command.add_argument("flags", nargs="*")
    command.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.core.errors import ConfigError
    from rl4llm.extensions.servers.launch import serve

    if asked := next((flag for flag in arguments.flags if flag.startswith("--environments")), None):
        raise ConfigError(
            f"{asked} is not an option of an inference server. Environments are hosted by `rl4llm serve-env --env tool,code "
            "--port 50051`."
        )
    return serve(arguments.flags)
