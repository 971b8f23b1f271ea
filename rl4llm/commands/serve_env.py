"""``rl4llm serve-env``: host environments for trainers elsewhere."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_overrides
from rl4llm.commands.output import say
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    examples = (
        "rl4llm serve-env --env tool,chat --port 50051",
        "rl4llm train configs/remote_grpo.yaml env.remote=127.0.0.1:50051",
    )
    about = "host environments, with tools and rewards, for trainers elsewhere"
    command = add_command(commands, "serve-env", run, about, examples)
    command.add_argument("--env", required=True, help="what to host, as in env.name: tool,chat,package.module:Class")
    command.add_argument("--host", default="127.0.0.1", help="where to listen; others need a token (default: %(default)s)")
    command.add_argument("--port", type=int, default=50051, help="0 takes a free one (default: %(default)s)")
    add_overrides(command, "sandbox.key=value", "where programs of the policy run")


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.serve_env import serve_env

    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port} is not accepted: a number from 1 to 65535, or 0 for a free one.")
    names = [name.strip() for name in arguments.env.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--env {arguments.env!r} names no environment. Accepted: names, such as tool,chat.")
    return serve_env(names, arguments.host, arguments.port, arguments.overrides, say)
