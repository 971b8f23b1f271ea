"""Which GPUs a process may use, by its environment, and the kernels that it uses there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"  # Slurm and other schedulers set it too
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


def use_exact_kernels() -> None:
    """Have this process compute float32 exactly on a GPU, and choose attention kernels that need no plan for each shape.

    TF32 would round the positions of rotary embeddings above 2,048. Attention of cuDNN plans each new shape for up to half a
    second, and nearly every micro-batch has new shapes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)
