"""Serve the embedded engine: ``python -m rl4llm.extensions.servers.embedded MODEL --port P``, which `rl4llm serve` runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from rl4llm.backends.model_files import model_directory
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.compose.engines import build_client
from rl4llm.compose.setup import Machine, Setup, set_up_torch
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.core.registry import load
from rl4llm.extensions.servers.embedded.options import read_options
from rl4llm.extensions.servers.embedded.server import EmbeddedServer, tell
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.terminal import visible

BACKLOG = 1024  # connections that may wait: all episodes of a rollout connect at once


def main(words: Sequence[str]) -> int:
    """Serve until stopped; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="rl4llm-images-") as images:
        return _serve(words, Path(images))


def _serve(words: Sequence[str], images: Path) -> int:
    """Serve; the images of requests are kept in the directory `images`."""
    try:
        options = read_options(words)
        config = load_config(overrides=options.overrides)
        machine = Machine.of(config)
        set_up_torch(config, machine)
        path = str(model_directory(config.model.path))
        model = load_model(path, dtype=config.model.dtype, device=machine.device)
        if config.model.vision != "none":
            load("rl4llm.extensions.servers.embedded.images:add_images")(model, path, images)
        tokenizer = load_tokenizer(path, pad_token=config.model.pad_token)
        engine = build_client(Setup.of(config, None, tokenizer, machine), model)
    except RL4LLMError as error:
        sys.stderr.write(visible(f"{type(error).__name__}: {error}") + "\n")
        return 2 if isinstance(error, ConfigError) else 1
    assert isinstance(engine, LocalClient)  # inference.name is no key of this command

    async def application() -> web.Application:
        server = EmbeddedServer(model, tokenizer, engine, options.model, path, options.api_key)
        tell(f"Serves {path}; {engine.path()}.")
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
