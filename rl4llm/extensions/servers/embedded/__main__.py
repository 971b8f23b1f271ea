"""Serve the embedded engine: ``python -m rl4llm.extensions.servers.embedded MODEL --port P``, which `rl4llm serve` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aiohttp import web

from rl4llm.backends.model_files import model_directory
from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.engines import build_client
from rl4llm.compose.models import plain_model, set_up_torch
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.extensions.servers.embedded.options import read_options
from rl4llm.extensions.servers.embedded.server import EmbeddedServer
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.terminal import visible

BACKLOG = 1024  # connections that may wait: all episodes of a rollout connect at once


def main(words: Sequence[str]) -> int:
    """Serve until stopped; return the exit code."""
    try:
        options = read_options(words)
        config = load_config(overrides=options.overrides)
        set_up_torch(config)
        model = plain_model(config, None)
        path = str(model_directory(config.model.path))
        tokenizer = load_tokenizer(path, pad_token=config.model.pad_token)
        engine = build_client(config, model, tokenizer)
    except RL4LLMError as error:
        sys.stderr.write(visible(f"{type(error).__name__}: {error}") + "\n")
        return 2 if isinstance(error, ConfigError) else 1
    assert isinstance(engine, LocalClient)  # inference.name is no key of this command

    async def application() -> web.Application:
        server = EmbeddedServer(model, tokenizer, engine, options.model, path, options.api_key)
        sys.stdout.write(visible(f"Serves {path}; {engine.path()}.") + "\n")
        sys.stdout.flush()
        return server.application()

    web.run_app(
        application(),
        host=options.host,
        port=options.port,
        backlog=BACKLOG,
        handler_cancellation=True,
        access_log=None,
        print=None,
        shutdown_timeout=0.5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
