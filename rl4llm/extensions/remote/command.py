"""``rl4llm serve env``: host environments for trainers on other machines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl4llm.commands.arguments import add_overrides
from rl4llm.core.errors import ConfigError

EXAMPLES = """examples:
  rl4llm serve env --env tool,chat --port 50051
  rl4llm train configs/remote_dapo.yaml env.remote=127.0.0.1:50051"""


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="rl4llm serve env",
        description="Host environments, with tools and rewards, for trainers on other machines.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--env",
        required=True,
        help="environments to host, named as in env.name: tool,chat,package.module:Class",
    )
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; all except loopback need a token (default: %(default)s)",
    )
    command.add_argument(
        "--port", type=int, default=50051, help="port; 0 for a free one (default: %(default)s)"
    )
    command.add_argument(
        "--tls-cert", type=Path, metavar="PEM", help="certificate for TLS; see env.remote_ca"
    )
    command.add_argument("--tls-key", type=Path, metavar="PEM", help="private key of the certificate")
    add_overrides(command, "sandbox.key=value", "sandbox for programs of the policy")
    return command


def run(words: Sequence[str]) -> int:
    """Serve until Ctrl-C; `words` are those after ``rl4llm serve env``."""
    arguments = parser().parse_intermixed_args(words)
    names = [name.strip() for name in arguments.env.split(",")]
    certificate = (arguments.tls_cert, arguments.tls_key)
    if not all(certificate) and any(certificate):  # the connection would not be encrypted
        raise ConfigError("--tls-cert and --tls-key are used together. Give both or neither.")
    from rl4llm.extensions.remote.serve_env import serve_env

    return serve_env(arguments, names, certificate if all(certificate) else None)
