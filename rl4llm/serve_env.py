"""``rl4llm serve-env --env tool,chat --port 50051``: host environments, with tools and rewards, for trainers elsewhere.

A trainer uses them with ``env.remote=host:port``. Whoever may speak to a host can start programs on it (an MCP server's
command is an option of an environment), so an address that other machines reach needs a token.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from rl4llm.build.environments import Hosting
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.envs.remote.host import EnvHost
from rl4llm.envs.remote.rpc import Server
from rl4llm.envs.remote.token import FILE_VARIABLE, VARIABLE, read_token
from rl4llm.inference.ports import check_free, is_loopback
from rl4llm.sandbox import Sandbox

GRACE_S = 1.0


def serve_env(names: Sequence[str], host: str, port: int, overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Host environments until a signal comes; raises ConfigError for what must not be started.

    `names` are those of environments, `overrides` keys of the section `sandbox`. Port 0 takes a free one, which is said.
    """
    token = read_token(os.environ)
    os.environ.pop(VARIABLE, None)  # what environments and rewards start need not know it
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"--host {host} without a token is not accepted: whoever reaches the port could start programs here. Next: set "
            f"{VARIABLE} or {FILE_VARIABLE} here and for the trainer, or keep 127.0.0.1 and reach it through `ssh -L`."
        )
    if port:
        check_free(host, port)
    hosting = Hosting(names, _sandbox(overrides))
    asyncio.run(_serve(EnvHost(hosting.classes, hosting.make, hosting.prompts, say), host, port, token, say))
    return 0


def _sandbox(overrides: Sequence[str]) -> Callable[[], Sandbox]:
    wrong = [text for text in overrides if not text.startswith("sandbox.")]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not accepted: a host takes keys of `sandbox` only, such as sandbox.slots=4.")
    chosen = load_config(overrides=["model.path=none", *overrides]).sandbox
    make = partial(Sandbox, chosen.level, allow_weak=chosen.allow_weak, slots=chosen.slots, packages=chosen.packages)
    make().close()  # which starts nothing, but refuses what no trainer could use
    return make


async def _serve(env_host: EnvHost, host: str, port: int, token: str, say: Callable[[str], None]) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = Server(env_host, host, port, token)
    await server.start()
    shown = f"[{host}]" if ":" in host else host
    say(f"Hosting {', '.join(env_host.names)} at {shown}:{server.port}{', for those who know the token' if token else ''}.")
    await stopping.wait()
    say("Stopping; trainers play their episodes elsewhere, or wait.")
    await server.stop(GRACE_S)
