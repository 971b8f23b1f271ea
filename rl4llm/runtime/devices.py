"""Ask torch about devices. Each type has a module, such as `torch.cuda` or `torch.mps`; what the module lacks is off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch
from torch.distributed import Backend

from rl4llm.runtime.gpus import GPU

TRIED = ("cpu", GPU)  # types on which the library has run


def accelerator() -> str:
    """Return the type of this machine's accelerator, "cpu" without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def default() -> str:
    """Return the device for "auto": an accelerator on which the library has run, otherwise "cpu"."""
    return kind if (kind := accelerator()) in TRIED else "cpu"


def names() -> list[str]:
    """Return the accelerators of this machine, as `model.device` names them."""
    kind = accelerator()
    return [f"{kind}:{index}" for index in range(0 if kind == "cpu" else call(kind, "device_count"))]


def properties(device: str) -> tuple[str, int]:
    """Return the name of a device and its bytes of memory; where torch tells neither, its type and the machine's memory."""
    card = call(device, "get_device_properties", torch.device(device))
    return getattr(card, "name", device), getattr(card, "total_memory", psutil.virtual_memory().total)


def call(device: torch.device | str, name: str, *args: Any) -> Any:
    """Call a function of the module that torch has for a device; return None where the module lacks it."""
    function = getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(*args)


def has_graphs(device: torch.device) -> bool:
    """Return whether graphs and kernels that exist for CUDA alone run on a device."""
    return device.type == GPU and torch.cuda.is_available()


def collective_backend() -> str:
    """Return the backend of a process group: gloo for numbers on the CPU, and what torch names for the accelerator."""
    kind = accelerator()
    backend = Backend.default_device_backend_map.get(kind, "gloo")
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"


def current() -> AbstractContextManager[Any]:
    """Return a context in which calls that name no device use the one that they use now."""
    module = _in_use()
    return module.device(module.current_device()) if hasattr(module, "device") else nullcontext()


def memory() -> tuple[int, int, int] | None:
    """Return the bytes allocated on the current device, their peak, and the bytes reserved; None if torch does not count."""
    module = _in_use()
    if not hasattr(module, "max_memory_allocated"):
        return None
    return module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved()


def use_exact_kernels() -> None:
    """Have this process compute float32 exactly on a GPU, and choose attention kernels that need no plan for each shape.

    TF32 would round the positions of rotary embeddings above 2,048. Attention of cuDNN plans each new shape for up to half a
    second, and nearly every micro-batch has new shapes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def _in_use() -> Any:
    """Return the module of the accelerator once this process uses it, otherwise None; do not start the accelerator."""
    kind = torch.accelerator.current_accelerator(check_available=False)
    module: Any = None if kind is None else torch.get_device_module(kind)
    return module if module and getattr(module, "is_initialized", module.is_available)() else None
