"""The one place that asks torch about the device: what it has, and what this process does with it.

Each type of accelerator has a module, such as `torch.cuda`, `torch.xpu` or `torch.mps`. What a module lacks is turned off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rl4llm.runtime.gpus import GPU

TRIED = ("cpu", GPU)
"""Types of devices on which the library has run."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that torch has on the device: allocated now, at most since `reset_peak`, and reserved."""

    allocated: int
    peak: int
    reserved: int


def accelerator() -> str:
    """Return the type of this machine's accelerator, "cpu" without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def default() -> str:
    """Return the device for "auto": an accelerator on which the library has run, otherwise "cpu"."""
    return kind if tried(kind := accelerator()) else "cpu"


def tried(device: str) -> bool:
    """Return whether the library has run on this type of device."""
    return torch.device(device).type in TRIED


def count(device: str) -> int:
    """Return how many devices of this type torch finds on this machine."""
    try:
        number: int = torch.get_device_module(device).device_count()
    except RuntimeError:  # torch has no such type, or no module for it
        return 0
    return number


def names() -> list[str]:
    """Return the devices of this machine, as `model.device` names them."""
    kind = accelerator()
    return ["cpu"] if kind == "cpu" else ["cpu", *(f"{kind}:{index}" for index in range(count(kind)))]


def model_name(device: str) -> str:
    """Return the name of a device's hardware, or its type where torch has no other."""
    return str(getattr(_properties(device), "name", torch.device(device).type))


def total_memory(device: str) -> int:
    """Return the bytes of a device; those of the machine where the device shares its memory."""
    return int(getattr(_properties(device), "total_memory", psutil.virtual_memory().total))


def multiplies_bfloat16(kind: str) -> bool:
    """Return whether an accelerator has bfloat16 products; one that only a plan knows has them."""
    module = torch.get_device_module(kind)
    if not module.is_available():
        return True
    return hasattr(module, "is_bf16_supported") and module.is_bf16_supported(including_emulation=False)


def captures_graphs(device: torch.device) -> bool:
    """Return whether a fixed sequence of kernels can be captured as a graph, by the functions of CUDA."""
    return device.type == GPU and torch.cuda.is_available()


def has_flash(device: torch.device) -> bool:
    """Return whether torch may have a flash kernel for caches of fixed size."""
    return device.type == GPU


@cache
def pins(kind: str) -> bool:
    """Return whether a device copies faster to memory of the host that is pinned, and the system grants it."""
    try:
        return kind != "cpu" and torch.empty(1, pin_memory=True) is not None
    except (RuntimeError, NotImplementedError):
        return False


def collective_backend() -> str:
    """Return the backend of a process group: gloo for numbers on the CPU, and what torch names for the accelerator."""
    kind = accelerator()
    backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"


def set_current(device: torch.device) -> None:
    """Have calls that name no device use this one."""
    _call(torch.get_device_module(device), "set_device", device)


def current() -> int:
    """Return the number of the current device; -1 while this process uses none."""
    return -1 if (module := _in_use()) is None else int(_call(module, "current_device") or 0)


def inside(index: int) -> AbstractContextManager[Any]:
    """Return a context in which calls that name no device use this one; -1 changes nothing."""
    module = _in_use() if index >= 0 else None
    return nullcontext() if module is None or not hasattr(module, "device") else module.device(index)


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device has done its work, by default the current one."""
    _call(torch.get_device_module(device or accelerator()), "synchronize", *([device] if device else ()))


def empty_cache(device: torch.device) -> None:
    """Return memory that torch reserves to the device."""
    _call(torch.get_device_module(device), "empty_cache")


def memory() -> Memory | None:
    """Return the memory of the current device; None without one, or where torch does not measure it."""
    module = _in_use()
    if module is None or not hasattr(module, "max_memory_allocated"):
        return None
    return Memory(module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved())


def reset_peak() -> None:
    """Measure the peak of `memory` from now on."""
    torch.get_device_module(accelerator()).reset_peak_memory_stats()


def random_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of all generators of this machine's accelerator, by its type."""
    kind = accelerator()
    indices = range(0 if kind == "cpu" else count(kind))
    return {kind: [torch.get_device_module(kind).get_rng_state(index) for index in indices]}


def set_random_state(device: str, state: torch.Tensor) -> None:
    """Set the state of a device's generator."""
    torch.get_device_module(device).set_rng_state(state, torch.device(device))


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the CPU and of a device when it ends."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def use_exact_kernels() -> None:
    """Have this process compute float32 exactly on a GPU, and choose attention kernels that need no plan for each shape.

    TF32 would round the positions of rotary embeddings above 2,048. Attention of cuDNN plans each new shape for up to half a
    second, and nearly every micro-batch has new shapes.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def _in_use() -> ModuleType | None:
    """Return torch's module of the accelerator once this process uses it. It does not start the accelerator."""
    kind = torch.accelerator.current_accelerator(check_available=False)
    module = None if kind is None else torch.get_device_module(kind)
    return module if module and getattr(module, "is_initialized", module.is_available)() else None


def _properties(device: str) -> Any:
    module = torch.get_device_module(device)
    return _call(module, "get_device_properties", torch.device(device))


def _call(module: ModuleType, name: str, *args: Any) -> Any:
    """Call a function of a module if it has it."""
    return getattr(module, name)(*args) if hasattr(module, name) else None
