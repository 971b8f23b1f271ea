"""The GPUs of this machine that a run gets: all of them, or those that CUDA_VISIBLE_DEVICES leaves visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rl4llm.config import Config
from rl4llm.core.errors import ConfigError
from rl4llm.runtime.gpus import VISIBLE, visible_gpus


def present(environ: Mapping[str, str]) -> list[str]:
    """Return the visible GPUs of this machine, as CUDA_VISIBLE_DEVICES names them for a process that gets some of them."""
    count, names = torch.cuda.device_count(), visible_gpus(environ)
    return [str(number) for number in range(count)] if names is None else names[:count]


def check_gpus(asked: int, what: str, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if `what` asks for more GPUs than the visible ones, `names`."""
    if asked > len(names):
        visible = f" ({VISIBLE}={environ[VISIBLE]!r})" if VISIBLE in environ else ""
        raise ConfigError(
            f"{what} needs {asked} GPU(s), but this machine has {len(names)} visible{visible}. Next: lower these numbers, "
            "make more GPUs visible, or run without GPUs (model.device=cpu launch.server_gpus=0)."
        )


def check_ranks(config: Config, nproc: int, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for more processes on this machine than GPUs. Where it has none, they train on the CPU."""
    names = present(environ)
    if config.model.device != "cpu" and names:
        check_gpus(nproc, f"--nproc {nproc}, with one process per GPU,", names, environ)
