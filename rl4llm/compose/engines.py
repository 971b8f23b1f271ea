"""From the configuration to the engine that samples, the publisher of its weights, and their proof."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rl4llm.backends.models import empty_model
from rl4llm.compose.models import vision_of
from rl4llm.compose.setup import Setup
from rl4llm.config import Config
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient, BasePublisher
from rl4llm.core.errors import ConfigError, EngineError, RL4LLMError
from rl4llm.core.registry import from_extension, load
from rl4llm.core.schema import check_options, with_options
from rl4llm.core.tables import ENGINES, PUBLISHERS
from rl4llm.runs.run_dir import RunDir
from rl4llm.sync.verify import Canary
from rl4llm.tracking.run import RunTracker

NAMED_WITHIN_S = 10.0


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
    config, given, ranks = setup.config, setup.given.model, setup.machine.ranks
    if not config.inference.get("cohost"):
        return

    def free() -> None:
        if ranks.is_first:
            model = empty_model(config.model.path) if given is None else given
            from_extension("free_device", "inference.cohost")(build_client(setup, model), server_urls(config))

    elsewhere = EngineError("The server did not free the device. See the error of rank 0.")
    ranks.agree(free, (RL4LLMError,), elsewhere)


def check_engine(config: Config) -> None:
    """Raise ConfigError for options that the engine does not accept; contact no server."""
    options = dict(config.inference)
    engine, fixed = ENGINES[options.pop("name")], {"model", "tokenizer", "deterministic", "autocast"}
    beside: tuple[str, ...] = ("name",)
    if config.model.vision != "none" and not engine.takes_images:
        takes = ", ".join(sorted(name for name in ENGINES if ENGINES[name].takes_images))
        raise ConfigError(
            f"model.vision={config.model.vision} is not accepted with inference.name={config.inference['name']!r}, which "
            f"takes no images. Accepted: {takes}."
        )
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
    urls = [urls] if isinstance(urls, str) else urls
    return list(urls)


def check_hosts(config: Config) -> None:
    """Raise ConfigError for a server or router whose name stays unknown for `NAMED_WITHIN_S`: nothing can start there.

    A cluster that just started a server may take seconds to publish its name.
    """
    router = config.inference.get("router")
    for url in [*server_urls(config), *([router] if isinstance(router, str) else [])]:
        host, end = urlsplit(url).hostname, time.monotonic() + NAMED_WITHIN_S
        while (problem := _unknown_name(host)) and time.monotonic() < end:
            time.sleep(NAMED_WITHIN_S / 10)
        if problem:
            raise ConfigError(
                f"inference.url={url!r}: the host name {host!r} is not known ({problem}). Check its spelling, or use its IP "
                "address."
            )


def _unknown_name(host: str | None) -> str | None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror or str(error)
    return None


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
    image = load("rl4llm.sync.canary_image:CanaryImage")(vision) if vision else None
    exact = setup.config.sync.tolerance or 0.0
    return Canary(client.vocab_size, dtype=setup.machine.computed, tolerance=exact, image=image)


def check_sync(config: Config) -> None:
    """Raise ConfigError for publishers that do not fit the engine or each other; contact no server."""
    engine = ENGINES[config.inference["name"]]
    for key, name in (("sync.name", config.sync.name), ("sync.fallback", config.sync.fallback)):
        if name in ("auto", None):
            continue
        PUBLISHERS[name]
        if name not in engine.publishers:
            raise ConfigError(
                f"{key}={name!r} is not accepted with inference.name={config.inference['name']!r}. "
                f"Accepted: {', '.join(engine.publishers)}."
            )
    _check_features(config, engine)
    if config.rollout.max_staleness:
        _check_staleness(config, engine)
    if config.inference.get("cohost") and (
        config.sync.name not in ("auto", "filesystem") or config.sync.fallback
    ):
        raise ConfigError(
            "inference.cohost=true publishes through files. Remove sync.name and sync.fallback."
        )
    if config.inference.get("cohost") and config.inference.get("router"):
        raise ConfigError(
            "inference.cohost=true cannot be combined with inference.router: a router checks the health of servers "
            "that sleep, which makes them generate. Remove inference.router (and launch.router)."
        )
    if config.sync.dir and Path(config.sync.dir).resolve() == Path(config.output.dir).resolve():
        raise ConfigError(
            f"sync.dir={config.sync.dir!r} is the same directory as output.dir. Remove sync.dir to use weights/ in "
            "output.dir, or set another directory."
        )


def _check_staleness(config: Config, engine: type[BaseClient]) -> None:
    """Raise ConfigError if the engine cannot sample while the trainer trains."""
    what = f"inference.name={config.inference['name']!r}" if not engine.is_server else None
    what = "inference.cohost=true" if config.inference.get("cohost") else what
    key = f"rollout.max_staleness={config.rollout.max_staleness}"
    if what is not None:
        servers = " or ".join(name for name in ENGINES if ENGINES[name].is_server)
        raise ConfigError(
            f"{key} cannot be combined with {what}: it needs servers on separate devices, {servers}."
        )


def _check_features(config: Config, engine: type[BaseClient]) -> None:
    """Raise ConfigError where a server could use features that an earlier version made of an image."""
    kept = config.model.vision == "train" and engine.keeps_features
    steps = config.rollout.max_staleness
    if kept and (steps or config.inference.get("router")):
        key = f"rollout.max_staleness={steps}" if steps else "inference.router"
        raise ConfigError(
            f"{key} cannot be combined with model.vision=train and inference.name={config.inference['name']!r}, whose "
            "servers keep the features of the tower for later requests. Set model.vision=frozen, or max_staleness=0 and no "
            "inference.router."
        )


def check_parts(setup: Setup, backend: BaseBackend) -> None:
    """Raise ConfigError for publishers without files if each rank holds a part of the weights.

    A server that comes back gets its weights at any time, when the other ranks do not take part in gathering them.
    """
    config = setup.config
    if backend.whole or setup.machine.ranks.size == 1:
        return
    for key, name in (("sync.name", config.sync.name), ("sync.fallback", config.sync.fallback)):
        if name == "distributed":
            raise ConfigError(
                f"{key}={name!r} is not accepted if each rank holds a part of the weights (backend={config.backend}): a "
                "server that comes back later could not get them. Accepted: filesystem, or lora for an adapter; or set "
                "shard=ddp or a zero_stage below 3."
            )


def check_adapter_alone(config: Config) -> None:
    """Raise ConfigError if servers cannot get the adapter alone, since something else changes their own weights."""
    impossible = {
        "model.lora.rank=0, which trains the whole model. Set it, e.g. to 16": not config.model.lora.rank,
        "inference.router, which does not know of adapters. Remove it": config.inference.get("router"),
        "sync.fallback: merged weights under an adapter would count twice. Remove it": config.sync.fallback,
    }
    for reason, holds in impossible.items():
        if holds:
            raise ConfigError(f"sync.name=lora cannot be combined with {reason}.")
