"""Which GPUs a process may use, by its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

GPU = "cuda"  # torch's name for GPUs of NVIDIA, and in its ROCm builds for those of AMD
VISIBLE = "CUDA_VISIBLE_DEVICES"  # Slurm and other schedulers set it too
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NAME = re.compile(r"\d+|(GPU|MIG)-.+")


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES as they are written: numbers, UUIDs or MIG devices. None if it is not set.

    CUDA ignores an invalid entry and all that follow.

    >>> visible_gpus({VISIBLE: "4,GPU-8932f937,-1,5"}), visible_gpus({VISIBLE: ""}), visible_gpus({})
    (['4', 'GPU-8932f937'], [], None)
    """
    if VISIBLE not in environ:
        return None
    return list(takewhile(NAME.fullmatch, map(str.strip, environ[VISIBLE].split(","))))
