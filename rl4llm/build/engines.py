"""From the configuration to the engine that samples, the way weights take to it, and their proof."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl4llm.build.models import all_ranks
from rl4llm.build.options import with_options
from rl4llm.config import Config
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry
from rl4llm.core.run_dir import RunDir
from rl4llm.inference.command import KEY_VARIABLE
from rl4llm.inference.fleet import FleetClient
from rl4llm.inference.local import LocalClient
from rl4llm.inference.server import ServerClient
from rl4llm.inference.sglang import SGLangClient
from rl4llm.inference.vllm import VLLMClient
from rl4llm.sync.claim import ClaimingPublisher
from rl4llm.sync.cohost import CohostedClient, CohostPublisher
from rl4llm.sync.fallback import FallbackPublisher
from rl4llm.sync.filesystem import FilesystemPublisher
from rl4llm.sync.lora import LoraPublisher
from rl4llm.sync.memory import MemoryPublisher
from rl4llm.sync.store import WeightStore
from rl4llm.sync.tensor import TensorPublisher
from rl4llm.sync.verify import Canary
from rl4llm.tracking.run import RunTracker

ENGINES: Registry[type[BaseClient]] = Registry("inference.name", BaseClient)
ENGINES.register("local")(LocalClient)
ENGINES.register("sglang")(SGLangClient)
ENGINES.register("vllm")(VLLMClient)

PUBLISHERS: Registry[Callable[[BaseClient, WeightStore, Any], BasePublisher]] = Registry("sync.name")


@PUBLISHERS.register("memory")
def _in_memory(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return MemoryPublisher(client)


@PUBLISHERS.register("filesystem")
def _by_file_system(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return FilesystemPublisher(client, store, tokenizer.save_pretrained)


@PUBLISHERS.register("tensor")
def _in_requests(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return TensorPublisher(client, "tensor")


@PUBLISHERS.register("distributed")
def _by_broadcast(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return TensorPublisher(client, "distributed")


@PUBLISHERS.register("lora")
def _by_adapter(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return LoraPublisher(client, store)


def build_client(config: Config, model: Any, tokenizer: Any) -> BaseClient:
    """What samples: the embedded engine, which shares the model's tensors, or a fleet of one or more servers."""
    options = dict(config.inference)
    engine = ENGINES[options.pop("name")]
    if not issubclass(engine, ServerClient):
        return with_options("inference", engine, options, model, tokenizer, deterministic=config.deterministic)
    cohost, router, urls = options.pop("cohost", False), options.pop("router", None), server_urls(config)
    options.pop("url", None)
    options.setdefault("api_key", os.environ.get(KEY_VARIABLE))
    text = model.config.get_text_config()
    options.setdefault("context_length", text.max_position_embeddings)
    vocab_size = model.get_input_embeddings().num_embeddings

    def make(url: str) -> ServerClient:
        return with_options("inference", engine, options, url, tokenizer, vocab_size=vocab_size)

    fleet = FleetClient([make(url) for url in urls], router=make(router) if router else None)
    return CohostedClient(fleet) if cohost else fleet


def server_urls(config: Config) -> list[str]:
    """Where the servers are; none for the embedded engine."""
    engine = ENGINES[config.inference["name"]]
    if not issubclass(engine, ServerClient):
        return []
    urls = config.inference.get("url", engine.usual_url())
    urls = [urls] if isinstance(urls, str) else urls
    if not isinstance(urls, Sequence) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"inference.url={urls!r} is not accepted: an address such as http://HOST:PORT, or a list of them.")
    return list(urls)


def build_publisher(config: Config, client: BaseClient, run: RunDir, tokenizer: Any, tracker: RunTracker) -> BasePublisher:
    """The way that weights take, and the one they take when it fails."""
    sync = config.sync
    store = WeightStore(Path(sync.dir) if sync.dir else run.weights_dir, keep=sync.keep)
    if isinstance(client, CohostedClient):
        publisher: BasePublisher = CohostPublisher(client, FilesystemPublisher(client, store, tokenizer.save_pretrained))
    else:
        publisher = PUBLISHERS[client.publishers[0] if sync.name == "auto" else sync.name](client, store, tokenizer)
    if sync.fallback is not None:
        publisher = FallbackPublisher(publisher, PUBLISHERS[sync.fallback](client, store, tokenizer), tracker.warn)
    urls = server_urls(config)
    return ClaimingPublisher(publisher, urls) if urls else publisher


def build_canary(config: Config, client: BaseClient) -> Canary | None:
    if not config.sync.verify:
        return None
    coarse = config.model.dtype if config.model.autocast == "none" else config.model.autocast
    return Canary(client.vocab_size, dtype=coarse, tolerance=config.sync.tolerance or 0.0)


def check_sync(config: Config, needs: Needs) -> None:
    """Raise ConfigError for ways that do not go together; nothing is opened or asked."""
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
    if config.rollout.ahead:
        _check_ahead(config, engine, needs)
    if config.inference.get("cohost") and (config.sync.name not in ("auto", "filesystem") or config.sync.fallback):
        raise ConfigError("inference.cohost=true publishes through files: leave sync.name and sync.fallback out.")
    if config.sync.dir and Path(config.sync.dir).resolve() == Path(config.output.dir).resolve():
        raise ConfigError(
            f"sync.dir={config.sync.dir!r} is output.dir, which belongs to the run. Leave sync.dir out, for weights/ in it, "
            "or give another directory."
        )


def _check_ahead(config: Config, engine: type[BaseClient], needs: Needs) -> None:
    """Who plays while the trainer trains needs weights, and a device, of its own, and what it played has older ones."""
    what = f"inference.name={config.inference['name']!r}" if not issubclass(engine, ServerClient) else None
    what = "inference.cohost=true" if config.inference.get("cohost") else what
    if what is not None:
        servers = " or ".join(name for name in ENGINES if issubclass(ENGINES[name], ServerClient))
        raise ConfigError(f"rollout.ahead=true does not go with {what}: it needs servers of their own, {servers}.")
    if needs.newest:
        raise ConfigError(
            "rollout.ahead=true samples with weights one step older, for which algorithm.old_logprobs=recomputed alone does "
            "not account. Set algorithm.correction too, for example to tis, or leave old_logprobs=sampled."
        )


def check_parts(config: Config, backend: BaseBackend) -> None:
    """A server that fails and comes back is given tensors at any time, when ranks that hold parts do not stand by."""
    if backend.whole or all_ranks(config).size == 1:
        return
    for key, name in (("sync.name", config.sync.name), ("sync.fallback", config.sync.fallback)):
        if name in ("tensor", "distributed"):
            raise ConfigError(
                f"{key}={name!r} is not accepted where each rank holds a part of the weights (backend={config.backend}): a "
                "server that comes back later could not be given them. Accepted: filesystem, and lora for an adapter; or "
                "shard=ddp or a zero_stage below 3."
            )


def check_adapter_alone(config: Config) -> None:
    """Servers can be given the adapter alone only where nothing else ever changes their own weights."""
    impossible = {
        "model.lora.rank=0: the whole model trains. Set it, e.g. to 16": not config.model.lora.rank,
        "inference.router, which is not told of adapters. Leave it out": config.inference.get("router"),
        "sync.fallback: merged weights under an adapter would count twice. Leave it out": config.sync.fallback,
    }
    for reason, holds in impossible.items():
        if holds:
            raise ConfigError(f"sync.name=lora does not go with {reason}.")
