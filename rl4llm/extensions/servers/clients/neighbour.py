"""What a server on this machine does not report: the GPUs that it sees, its NCCL, and the shape of its model."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from yarl import URL

from rl4llm.core.errors import ConfigError, EngineError
from rl4llm.runtime.gpus import VISIBLE, visible_gpus
from rl4llm.runtime.ports import holder, is_loopback

NCCL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FILES = "Set sync.name=filesystem, or install the same nvidia-nccl in both environments."


def check_gpu_is_shared(url: str, device: torch.device) -> None:
    """Raise EngineError if the server cannot open memory of this GPU. It would die of the attempt."""
    other = "sync.name=tensor passes handles of GPU memory, but {url} {why}. Set sync.name=filesystem or distributed."
    if not is_own(URL(url).host or ""):
        raise EngineError(other.format(url=url, why="is on another machine"))
    theirs = next((found for process in _processes(url) if (found := _environ(process))), {})
    names = visible_gpus(theirs)
    index = device.index or 0
    ours = (visible_gpus(os.environ) or [str(number) for number in range(index + 1)])[index]
    if names is not None and not sees(names, ours, str(torch.cuda.get_device_properties(index).uuid)):
        raise EngineError(
            other.format(
                url=url, why=f"does not see the trainer's GPU {ours} ({VISIBLE}={theirs[VISIBLE]!r})"
            )
        )


def sees(names: list[str], ours: str, uuid: str) -> bool:
    """Return whether a process with these visible GPUs may see ours. Numbers, and MIG devices, compare only with their kind.

    >>> sees(["5"], "4", "8932"), sees(["4", "5"], "4", "8932"), sees(["GPU-89"], "4", "8932"), sees(["GPU-77"], "4", "8932")
    (False, True, True, False)
    """
    if any(name.isdecimal() != ours.isdecimal() and not name.startswith("GPU-") for name in names):
        return True
    return any(name == ours or (name[:4] == "GPU-" and uuid.startswith(name[4:])) for name in names)


def check_same_nccl(url: str) -> None:
    """Raise EngineError if trainer and server have different versions of NCCL, which refuse to form one group.

    A server on another machine does not show its version.
    """
    ours = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    theirs = nccl_of(url)
    if theirs is not None and theirs != ours:
        raise EngineError(
            f"sync.name=distributed needs one version of NCCL on both sides: the trainer has {ours}, {url} has {theirs}. "
            f"{FILES}"
        )


def nccl_of(url: str) -> str | None:
    """Return the version of the NCCL that a server on this machine has loaded; None if it cannot be found out."""
    for process in _processes(url):
        try:
            files = {Path(region.path) for region in process.memory_maps()}
        except psutil.Error:
            continue
        for file in files:
            if file.name.startswith("libnccl.so") and (found := nccl_beside(file)):
                return found
    return None


def nccl_beside(library: Path) -> str | None:
    """Return the version of the package that a library belongs to: SITE/nvidia/nccl/lib/libnccl.so.2."""
    site = library.parents[3] if len(library.parents) > 3 else library.parent
    return next((found[1] for path in site.glob("*.dist-info") if (found := NCCL.fullmatch(path.name))), None)


def check_same_model(url: str, held: str | None, path: str | None) -> None:
    """Raise ConfigError if the directory `path` has another model than `held`, the server's, which would crash it.

    It compares nothing if this machine cannot read one of them.
    """
    own, given = _described(held), _described(path)
    both = [name for name in SHAPE if name in own and name in given]
    differ = [f"{name}={own[name]}, not {given[name]}" for name in both if own[name] != given[name]]
    if differ:
        raise ConfigError(
            f"{url} does not serve the model that trains: {held} has {', '.join(differ)}. Start the server with the model "
            "of model.path, or set inference.url to a server with that model."
        )


def _described(directory: str | None) -> Mapping[str, Any]:
    """Return the config.json of a model; an empty one if it cannot be read."""
    if not directory:
        return {}
    try:
        found = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def is_own(host: str) -> bool:
    """Return whether an address is one of this machine."""
    own = {item.address for found in psutil.net_if_addrs().values() for item in found}
    try:
        return is_loopback(host) or socket.gethostbyname(host) in own
    except OSError:
        return False


def listener(url: str) -> psutil.Process | None:
    """Return the process that listens at an address of this machine; None if there is none, or it is hidden."""
    address = URL(url)
    pid = holder(address.port or 0) if is_own(address.host or "") else None
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.Error:
        return None


def _processes(url: str) -> Iterator[psutil.Process]:
    """Yield the process that listens at an address of this machine, and its children; nothing where they are hidden."""
    process = listener(url)
    if process is not None:
        try:
            yield from (process, *process.children(recursive=True))
        except psutil.Error:
            return


def _environ(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
