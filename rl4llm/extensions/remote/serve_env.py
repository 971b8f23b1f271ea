"""``rl4llm serve env --env tool,chat --port 50051``: host environments, with tools and rewards, for other machines.

A trainer uses them with ``env.remote=host:port``. A caller can start programs on a host, since the command of an MCP
server is an option of an environment. So a host requires a token. An address that other machines can reach needs a
configured token; on loopback, the host creates one that only the same user can read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl4llm.commands.output import say
from rl4llm.compose.environments import build_sandbox
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.remote.host import EnvHost
from rl4llm.extensions.remote.rpc import Server
from rl4llm.extensions.remote.token import FILE_VARIABLE, VARIABLE, new_token, read_token, stored
from rl4llm.runtime.ports import check_free, is_loopback

GRACE_S = 1.0  # for running calls
LEAVE_S = 3.0  # to exit after a signal, even if an environment hangs


def serve_env(
    arguments: argparse.Namespace, names: Sequence[str], certificate: tuple[Path, Path] | None
) -> int:
    """Host environments until a signal arrives, given the command line and the files of a certificate and its key.

    Raises ConfigError for settings that are not safe or not valid.
    """
    host, port, token = arguments.host, arguments.port, read_token(os.environ)
    os.environ.pop(VARIABLE, None)  # processes of environments and rewards do not need it
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"--host {host} without a token is not accepted: anyone who reaches the port could start programs. Next: set "
            f"{VARIABLE} or {FILE_VARIABLE} here and for the trainer, or use 127.0.0.1 and connect through `ssh -L`."
        )
    if port:
        check_free(host, port)
    env_host = EnvHost(names, _sandbox(arguments.overrides), say)
    start_token = "" if token else new_token()
    where = f"[{host}]" if ":" in host else host

    async def serve() -> None:
        server = Server(env_host, host, port, token or start_token, certificate)
        with stored(start_token, server.port) if start_token else contextlib.nullcontext() as file:
            who = f"that can read its token file: {file}" if file else "with the same token"
            await _serve(server, f"Hosting {', '.join(names)} at {where}:{server.port}, for trainers {who}.")

    asyncio.run(serve())
    return 0


def _sandbox(overrides: Sequence[str]) -> Callable[[], Any]:
    if not all(text.startswith("sandbox.") for text in overrides):
        raise ConfigError(
            "The only keys of a host are those of the section `sandbox`, such as sandbox.slots=4."
        )
    config = load_config(overrides=["model.path=unused", *overrides])
    build_sandbox(config).close()  # starts nothing; each episode would fail with a wrong one
    return partial(build_sandbox, config)


async def _serve(server: Server, started: str) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    say(started)
    await stopping.wait()
    timer = threading.Timer(LEAVE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    say("Stopping; trainers play their episodes again on other hosts, or wait.")
    await server.stop(GRACE_S)
