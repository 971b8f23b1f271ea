"""From the configuration to the engine that samples, the publisher of its weights, and their proof."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from rl4llm.backends.models import empty_model
from rl4llm.compose.models import vision_of
from rl4llm.compose.setup import Setup
from rl4llm.config import Config
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient, BasePublisher
from rl4llm.core.errors import ConfigError, EngineError, RL4LLMError
from rl4llm.core.registry import from_extension
from rl4llm.core.schema import check_options, with_options
from rl4llm.core.tables import ENGINES, PUBLISHERS
from rl4llm.runs.run_dir import RunDir
from rl4llm.sync.verify import Canary, CanaryImage
from rl4llm.tracking.run import RunTracker


def build_client(setup: Setup, model: Any) -> BaseClient:
    """Make the engine: the embedded one, which shares the model's tensors, or a fleet of one or more servers."""
    config, options = setup.config, dict(setup.config.inference)
    engine = ENGINES[options.pop("name")]
    if engine.is_server:
        return from_extension("fleet", "inference.name")(config, engine, model, setup.tokenizer)
    fixed = {"deterministic": config.deterministic, "autocast": setup.machine.autocast}
    return with_options("inference", engine, options, model, setup.tokenizer, **fixed)


def free_device(setup: Setup) -> None:
    """Have servers that share the trainer's device (inference.cohost) free it, before a model of the trainer takes it."""
    config, loaded, ranks = setup.config, setup.given.model, setup.machine.ranks
    if not config.inference.get("cohost"):
        return

    def free() -> None:
        if ranks.is_first:
            model = empty_model(config.model.path) if loaded is None else loaded
            from_extension("free_device", "inference.cohost")(build_client(setup, model), server_urls(config))

    elsewhere = EngineError("The server did not free the device. See the error of rank 0.")
    ranks.agree(free, (RL4LLMError,), elsewhere)


def check_engine(config: Config) -> None:
    """Raise ConfigError for options that the engine does not accept; contact no server."""
    options = dict(config.inference)
    engine, fixed = ENGINES[options.pop("name")], {"model", "tokenizer", "deterministic", "autocast"}
    beside: tuple[str, ...] = ("name",)
    if engine.is_server:
        fixed = {"base_url", "tokenizer", "vocab_size", "ends"}
        beside = "name", "cohost", "router", "url", "wait_s"
        options = {name: value for name, value in options.items() if name not in beside}
        server_urls(config)
    check_options("inference", engine, options, fixed, beside)


def server_urls(config: Config) -> list[str]:
    """Return the addresses of the servers; none for the embedded engine."""
    engine: Any = ENGINES[config.inference["name"]]
    if not engine.is_server:
        return []
    urls = config.inference.get("url", engine.usual_url())
    urls = [urls] if isinstance(urls, str) else list(urls or ())
    places = {str(url).rstrip("/").replace("//localhost:", "//127.0.0.1:") for url in urls}
    if not urls or len(places) < len(urls):
        raise ConfigError("inference.url names no server, or one twice. Name each server once.")
    return urls


def build_publisher(
    setup: Setup, client: BaseClient, run: RunDir, tracker: RunTracker, others: Sequence[BaseBackend] = ()
) -> BasePublisher:
    """Make the publisher of weights, with its fallback and the claim on its servers.

    `others` are models on the device beside the one that is published.
    """
    config, sync, urls = setup.config, setup.config.sync, server_urls(setup.config)

    @functools.cache
    def store() -> Any:
        return from_extension("weight_store", "sync")(
            sync, run.weights_dir, urls, getattr(torch, setup.machine.computed), tracker.note
        )

    def make(name: str) -> BasePublisher:
        return PUBLISHERS[name](client, store, setup.tokenizer)

    if config.inference.get("cohost"):
        publisher = from_extension("cohost_publisher", "inference.cohost")(client, make("filesystem"), others)
    else:
        publisher = make(client.publishers[0] if sync.name == "auto" else sync.name)
    if sync.fallback is not None:
        publisher = from_extension("fallback_publisher", "sync.fallback")(
            publisher, make(sync.fallback), tracker.warn
        )
    return from_extension("claiming_publisher", "inference.url")(publisher, urls) if urls else publisher


def build_canary(setup: Setup, client: BaseClient) -> Canary:
    """Make the check that engines hold the trainer's weights, as exact as the trainer's dtype allows."""
    vision = vision_of(setup.config)
    image = CanaryImage(vision) if vision else None
    exact = setup.config.sync.tolerance or 0.0
    dtype = "nf4" if over_another_base(setup.config) else setup.machine.computed
    return Canary(client.vocab_size, dtype=dtype, tolerance=exact, image=image)


def over_another_base(config: Config) -> bool:
    """Return whether servers get the adapter of a 4-bit base alone, and may have that base in more bits."""
    return config.model.quantize != "none" and config.sync.name == "lora"


def check_parts(setup: Setup, backend: BaseBackend) -> None:
    """Raise ConfigError for publishers without files if each rank holds a part of the weights.

    A server that comes back gets its weights at any time, when the other ranks do not take part in gathering them.
    """
    sync, alone = setup.config.sync, backend.whole or setup.machine.ranks.size == 1
    if not alone and "distributed" in (sync.name, sync.fallback):
        raise ConfigError(
            "sync=distributed is not accepted if each rank holds a part of the weights: a server that comes back could not "
            "get them. Use filesystem, lora for an adapter, shard=ddp or a zero_stage below 3."
        )
