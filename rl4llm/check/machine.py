"""Checks of the machine around a run: whether servers and hosts answer, and whether there is room on the disk."""

from __future__ import annotations

import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rl4llm.backends.models import empty_model
from rl4llm.build import server_urls
from rl4llm.check.bench import Bench, NotNeeded
from rl4llm.config import Config, by_part
from rl4llm.core.errors import EngineError, RunDirError
from rl4llm.evaluate import existing
from rl4llm.inference.ports import describe, holder, is_loopback
from rl4llm.plan.memory import Numbers, model_memory, sharing_of
from rl4llm.plan.shape import shape_of

WAIT_S = 5.0


def servers(bench: Bench) -> str:
    """Every server and host that the configuration names answers; on this machine, nobody else has its port."""
    config = bench.config
    engines = [*server_urls(config), *filter(None, [config.inference.get("router")])] if bench.samples else []
    hosts = list(_hosts(config)) if bench.samples else []
    if not engines and not hosts:
        raise NotNeeded("the engine is in this process, and no part names a server")
    for url in engines:
        _check_engine(url)
    for address in hosts:
        _check_connects(address)
    return f"{', '.join([*engines, *hosts])} {'answers' if len(engines) + len(hosts) == 1 else 'answer'}"


def _check_engine(url: str) -> None:
    """Raise EngineError unless ``GET /health`` says 200, as servers of SGLang, vLLM and their routers do."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=WAIT_S) as answer:
            status = str(answer.status)
    except urllib.error.HTTPError as error:
        status = str(error.code)
    except (OSError, ValueError, http.client.HTTPException) as error:
        status = f"nothing ({getattr(error, 'reason', error)})"
    if status == "200":
        return
    pid = holder(urlsplit(url).port or 0) if is_loopback(urlsplit(url).hostname or "") else None
    if pid is not None:
        raise EngineError(
            f"{url}/health said {status}: the port is taken by {describe(pid)}, which is no healthy inference server. Next: "
            "stop it, wait until it is ready, or set inference.url to another port."
        )
    raise EngineError(
        f"{url}/health said {status}. Next: start the server (`rl4llm serve`), or set inference.url to where it is."
    )


def _hosts(config: Config) -> list[str]:
    """host:port of environments and judges elsewhere."""
    found = []
    for part in by_part(config).values():
        remote = part.env.get("remote") or ()
        found += [remote] if isinstance(remote, str) else list(remote)
        asked = [*(part.rewards or ()), *_values(part.env.get("opponents"))]
        urls = [urlsplit(item["url"]) for item in asked if isinstance(item, Mapping) and item.get("url")]
        found += [f"{url.hostname}:{url.port or (443 if url.scheme == 'https' else 80)}" for url in urls]
    return sorted(set(found))


def _values(item: object) -> list[object]:
    return list(item.values()) if isinstance(item, Mapping) else []


def check_remote(config: Config) -> None:
    """Raise EngineError unless the hosts of a part's environment answer: to play there would be to wait for them."""
    remote = config.env.get("remote") or ()
    for address in [remote] if isinstance(remote, str) else remote:
        _check_connects(address)


def _check_connects(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), WAIT_S).close()
    except (OSError, ValueError) as error:
        raise EngineError(f"{address} cannot be reached: {error}. Next: start what should listen there.") from error


def disk(bench: Bench) -> str:
    """There is room for the checkpoints that are kept while one more is written, for the weights given to servers, and for
    the model at the end; and the directory can be written to."""
    config = bench.config
    directory = existing(Path(config.output.dir))
    if not os.access(directory, os.W_OK):
        raise RunDirError(f"{directory} cannot be written to. Next: set output.dir to a directory of yours.")
    needed, free = _needed(config, served=bool(bench.samples and server_urls(config))), bench.free(directory)
    what = f"{config.checkpoint.keep} checkpoints, one more while it is written, and the model"
    text = f"{_gib(needed)} needed for {what}; {_gib(free)} free"
    if needed > free:
        raise RunDirError(
            f"{text} in {directory}. Next: set output.dir to a larger disk, or lower checkpoint.keep, which is "
            f"{config.checkpoint.keep}."
        )
    return text


def _needed(config: Config, *, served: bool) -> int:
    """Bytes: weights and moments of what trains for each checkpoint, whole weights for the model and each version served."""
    lora, numbers = config.model.lora, Numbers.of(config)
    shape = shape_of(empty_model(config.model.path), lora_rank=lora.rank, lora_targets=lora.targets)
    sharing = sharing_of(config.backend, 1, numbers.weights)
    model = model_memory(shape, sharing, 1, weight_bytes=numbers.weights, trains=True, autocast=False)
    weights = shape.adapter * 4 if shape.adapter else model.whole
    state = shape.trained() * 2 * (4 if sharing.master or shape.adapter else numbers.weights)
    versions = (config.sync.keep + 1) * model.whole if served and config.sync.dir is None else 0
    return (config.checkpoint.keep + 1) * (weights + state) + model.whole + versions


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
