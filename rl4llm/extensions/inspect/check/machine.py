"""Checks of the machine around a run: whether servers accept connections, and whether the disk has enough space."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from rl4llm.commands.scratch import existing
from rl4llm.compose import server_urls
from rl4llm.config import Config
from rl4llm.core.errors import EngineError, RunDirError
from rl4llm.core.model_memory import Precision
from rl4llm.core.tables import BACKENDS
from rl4llm.extensions.inspect.check.bench import Bench, NotNeeded
from rl4llm.extensions.inspect.plan.plan import judges_and_opponents
from rl4llm.extensions.inspect.plan.shape import read_shape, read_tower, with_tower
from rl4llm.extensions.inspect.plan.show import size_text

WAIT_S = 5.0


def servers(bench: Bench) -> str:
    """Check that every configured server, host and judge accepts connections."""
    config = bench.config
    urls = [*server_urls(config), config.inference.get("router")]
    urls += [item.get("url") for item in judges_and_opponents(config)]
    hosts = [host for part in config.environments.values() for host in _remote(part)]
    addresses = sorted({*map(_address, filter(None, urls)), *hosts})
    if not addresses:
        raise NotNeeded("the engine runs in this process, and no part names a server")
    for address in addresses:
        check_connects(address)
    return f"{', '.join(addresses)} accept{'s' if len(addresses) == 1 else ''} connections"


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _remote(config: Config) -> list[str]:
    """Return the hosts of a part's environment."""
    remote = config.env.get("remote") or ()
    return [remote] if isinstance(remote, str) else list(remote)


def check_remote(config: Config) -> None:
    """Raise EngineError unless the hosts of a part's environment respond, since playing would wait for them."""
    for address in _remote(config):
        check_connects(address)


def check_connects(address: str) -> None:
    """Raise EngineError unless the address accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), WAIT_S).close()
    except (OSError, ValueError) as error:
        raise EngineError(f"Cannot connect to {address}: {error}. Next: start its server.") from error


def disk(bench: Bench) -> str:
    """Check that the disk of the output directory has enough space.

    Counted are the checkpoints that are kept plus one being written, the weight versions for servers, and the final
    model.
    """
    config = bench.config
    directory = existing(Path(config.output.dir))
    needed = _needed(config, served=bool(bench.samples and server_urls(config)))
    free = shutil.disk_usage(directory).free
    what = f"{config.checkpoint.keep} checkpoints, one more while it is written, and the model"
    text = f"{size_text(needed)} needed for {what}; {size_text(free)} free"
    if needed > free:
        raise RunDirError(f"{text} in {directory}. Next: set another output.dir, or lower checkpoint.keep.")
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
