"""From the configuration to a fleet of inference servers; a run with the embedded engine does not import this."""

from __future__ import annotations

import os
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from rl4llm.compose.engines import server_urls
from rl4llm.compose.models import vision_of
from rl4llm.compose.setup import autocast_of
from rl4llm.config import Config
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import with_options
from rl4llm.data.lengths import ORIGINAL, context_limits
from rl4llm.extensions.servers.clients.images import check_features_are_named
from rl4llm.extensions.servers.fleet.cohosted import CohostedFleet
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.inference.embedded.stops import end_tokens
from rl4llm.runtime.ports import KEY_VARIABLE


def build_fleet(config: Config, engine: Any, model: Any, tokenizer: Any) -> FleetClient:
    """Make one client of the class `engine` for each server, and a fleet of them."""
    options = {name: value for name, value in config.inference.items() if name not in ("name", "url")}
    limits = FleetLimits(all_down_limit_s=options.pop("wait_s", FleetLimits().all_down_limit_s))
    cohost, router = options.pop("cohost", False), options.pop("router", None)
    options.setdefault("api_key", os.environ.get(KEY_VARIABLE))
    longest, reason = min(context_limits(model.config))
    options.setdefault("context_length", longest)
    if reason == ORIGINAL and options["context_length"] > longest:
        raise ConfigError(
            f"inference.context_length={options['context_length']} is not accepted: the longrope of the model changes after "
            f"{ORIGINAL}={longest}, and rows of both kinds cannot train together. Accepted: {longest} or less."
        )
    vision = vision_of(config)
    if vision is not None and config.model.vision == "train" and engine.keeps_features:
        check_features_are_named(vision)
    vocab_size = model.get_input_embeddings().num_embeddings

    def make(url: str) -> Any:
        fixed = {"vocab_size": vocab_size, "ends": end_tokens(model)}
        client = with_options("inference", engine, options, url, tokenizer, **fixed)
        _check_name(url)
        client.vision, client.autocast = vision, autocast_of(config)
        return client

    fleet = CohostedFleet if cohost else FleetClient
    members = [make(url) for url in server_urls(config)]
    return fleet(members, router=make(router) if router else None, limits=limits)


def _check_name(url: str, tries: int = 10) -> None:
    """Raise ConfigError for a host name that stays unknown for seconds, as that of a server which just started may."""
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError as error:
        if not tries:
            raise ConfigError(f"inference.url={url!r}: {error}. Check the host name.") from error
        time.sleep(1)
        _check_name(url, tries - 1)
