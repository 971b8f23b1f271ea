"""Checks of the machine around a run: whether servers and hosts respond, and whether the disk has enough space."""

from __future__ import annotations

import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rl4llm.commands.scratch import existing
from rl4llm.compose import server_urls
from rl4llm.config import Config, by_part
from rl4llm.core.errors import EngineError, RunDirError
from rl4llm.core.model_memory import Precision
from rl4llm.core.tables import BACKENDS
from rl4llm.extensions.inspect.check.bench import Bench, NotNeeded
from rl4llm.extensions.inspect.plan.shape import read_shape, read_tower, with_tower
from rl4llm.extensions.inspect.plan.show import size_text
from rl4llm.runtime.ports import describe, holder, is_loopback

WAIT_S = 5.0


def servers(bench: Bench) -> str:
    """Check that every configured server and host responds, and that no other process uses its port on this machine."""
    config = bench.config
    engines = [*server_urls(config), *filter(None, [config.inference.get("router")])] if bench.samples else []
    hosts = list(_hosts(config)) if bench.samples else []
    if not engines and not hosts:
        raise NotNeeded("the engine runs in this process, and no part names a server")
    for url in engines:
        _check_engine(url)
    for address in hosts:
        check_connects(address)
    return f"{', '.join([*engines, *hosts])} {'answers' if len(engines) + len(hosts) == 1 else 'answer'}"


def _check_engine(url: str) -> None:
    """Raise EngineError unless ``GET /health`` returns 200, as on servers of SGLang, vLLM and their routers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=WAIT_S) as answer:
            status = str(answer.status)
    except urllib.error.HTTPError as error:
        status = str(error.code)
    except (OSError, ValueError, http.client.HTTPException) as error:
        status = f"no response ({getattr(error, 'reason', error)})"
    if status == "200":
        return
    pid = holder(urlsplit(url).port or 0) if is_loopback(urlsplit(url).hostname or "") else None
    if pid is not None:
        raise EngineError(
            f"{url}/health: {status}. The port is in use by {describe(pid)}, which is not a healthy inference server. "
            "Next: stop it, wait until it is ready, or set inference.url to another port."
        )
    raise EngineError(
        f"{url}/health: {status}. Next: start the server (`rl4llm serve`), or set inference.url to its address."
    )


def _hosts(config: Config) -> list[str]:
    """Return the host:port of remote environments and judges."""
    found = []
    for part in by_part(config).values():
        remote = part.env.get("remote") or ()
        found += [remote] if isinstance(remote, str) else list(remote)
        opponents = part.env.get("opponents")
        asked = [*(part.rewards or ()), *(opponents.values() if isinstance(opponents, Mapping) else ())]
        urls = [urlsplit(item["url"]) for item in asked if isinstance(item, Mapping) and item.get("url")]
        found += [f"{url.hostname}:{url.port or (443 if url.scheme == 'https' else 80)}" for url in urls]
    return sorted(set(found))


def check_remote(config: Config) -> None:
    """Raise EngineError unless the hosts of a part's environment respond, since playing would wait for them."""
    remote = config.env.get("remote") or ()
    for address in [remote] if isinstance(remote, str) else remote:
        check_connects(address)


def check_connects(address: str) -> None:
    """Raise EngineError unless the address accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), WAIT_S).close()
    except (OSError, ValueError) as error:
        raise EngineError(
            f"Cannot connect to {address}: {error}. Next: start the server for this address."
        ) from error


def disk(bench: Bench) -> str:
    """Check that the output directory is writable and its disk has enough space.

    Counted are the checkpoints that are kept plus one being written, the weight versions for servers, and the final
    model.
    """
    config = bench.config
    directory = existing(Path(config.output.dir))
    if not os.access(directory, os.W_OK):
        raise RunDirError(
            f"{directory} is not writable. Next: set output.dir to a directory that you can write to."
        )
    needed, free = _needed(config, served=bool(bench.samples and server_urls(config))), bench.free(directory)
    what = f"{config.checkpoint.keep} checkpoints, one more while it is written, and the model"
    text = f"{size_text(needed)} needed for {what}; {size_text(free)} free"
    if needed > free:
        raise RunDirError(
            f"{text} in {directory}. Next: set output.dir to a larger disk, or lower checkpoint.keep, which is "
            f"{config.checkpoint.keep}."
        )
    return text


def _needed(config: Config, *, served: bool) -> int:
    """Return bytes: trained weights and moments per checkpoint, whole weights for the model and each version served."""
    lora, vision, precision = config.model.lora, config.model.vision, Precision.of(config.model.dtype)
    shape = read_shape(config.model.path, lora_rank=lora.rank, lora_targets=lora.targets)
    whole = shape if vision == "none" else with_tower(shape, read_tower(config.model.path))
    memory = BACKENDS[config.backend["name"]].memory
    saved = memory(whole if vision == "train" else shape, precision, config.backend).saved
    versions = config.sync.keep + 1 if served and config.sync.dir is None else 0
    return (config.checkpoint.keep + 1) * saved + (1 + versions) * memory(
        whole, precision, config.backend
    ).whole
