"""``rl4llm serve tinker``: serve models of this machine to clients of the Tinker SDK."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rl4llm.commands.output import say
from rl4llm.core.errors import ConfigError

KEY = "TINKER_API_KEY"
PUBLIC = "tml-local"


def run(words: Sequence[str]) -> int:
    """Serve until Ctrl-C; `words` are those after ``rl4llm serve tinker``."""
    arguments = _parser().parse_args(words)
    key = _key(arguments)
    directories = dict(_named(text) for text in arguments.model)

    from aiohttp import web

    from rl4llm.runs.lock import DirectoryLock
    from rl4llm.runtime.cpu import keep_freed_memory
    from rl4llm.runtime.ports import check_free, free_port, url_of
    from rl4llm_tinker.models import Base
    from rl4llm_tinker.server import application
    from rl4llm_tinker.service import Service

    arguments.output.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(arguments.output)
    port = arguments.port or free_port(arguments.host)
    check_free(arguments.host, port)
    keep_freed_memory()
    bases = {name: Base(name, path, arguments.dtype) for name, path in directories.items()}
    service = Service(bases, arguments.output, arguments.dtype)

    def ready(_: str) -> None:
        url = url_of(arguments.host, port)
        say(f"{url}  serves {', '.join(bases)} to Tinker clients. Ctrl-C stops it.")
        say(f"Their environment: TINKER_BASE_URL={url} {KEY}={'(the key)' if key else PUBLIC}")

    try:
        app = application(service, key)  # `ready` is called when it listens
        web.run_app(app, host=arguments.host, port=port, print=ready, access_log=None, shutdown_timeout=1)
    finally:
        lock.release()
    return 0


def _named(text: str) -> tuple[str, str]:
    """Return the name that clients know, and the directory or hub name of the model, by default the same."""
    name, _, source = text.partition("=")
    return name, os.path.expanduser(source) or name  # a shell expands no ~ behind a name


def _key(arguments: argparse.Namespace) -> str:
    """Return the key that clients must send; "" for any of the right form, on loopback alone."""
    from rl4llm.runtime.ports import is_loopback

    key: str = arguments.key or os.environ.get(KEY, "")
    if key == PUBLIC:  # which is printed for clients of a server without a key
        key = ""
    if not key and not is_loopback(arguments.host):
        raise ConfigError(f"--host {arguments.host} needs a key. Set --key or {KEY} to tml-...")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl4llm serve tinker",
        description="Serve models of this machine to clients of the Tinker SDK, which train and sample them.",
        epilog="example: rl4llm serve tinker --model Qwen/Qwen3-4B-Instruct-2507=models/tiny --output runs/tinker",
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME[=DIR]",
        help="a name that clients ask for, and the model's directory, by default the hub's of this name; may be repeated",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default="runs/tinker",
        metavar="DIR",
        help="for checkpoints (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: %(default)s)")
    parser.add_argument("--key", metavar="tml-...", help=f"that clients must send (default: that of {KEY})")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights; adapters are float32 (default: %(default)s)",
    )
    return parser
