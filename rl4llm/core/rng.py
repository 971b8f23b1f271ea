"""The global random number generators, as values that JSON can hold.

Nothing of rl4llm draws from them (see `rl4llm.core.seeds`), but users' environments and rewards do, and dropout.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rl4llm.core.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """The state of every global generator, in values that JSON can hold."""
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": [version, list(numbers), gauss],
        "numpy": {**legacy, "state": {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])}},
    }


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Put back what `rng_state` returned; returns what could not be, for example because this machine has other GPUs."""
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        inner = state["numpy"]["state"]
        key = np.array(inner["key"], dtype=np.uint32)
        np.random.set_state({**state["numpy"], "state": {"key": key, "pos": inner["pos"]}})
        torch.set_rng_state(_tensor(state["torch"]))
        return _restore_cuda(state["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"A saved random state is damaged ({type(error).__name__}: {error}).") from error


def _restore_cuda(states: list[str]) -> tuple[str, ...]:
    devices = torch.cuda.device_count()
    for device, state in enumerate(states[:devices]):
        torch.cuda.set_rng_state(_tensor(state), device)
    if len(states) == devices:
        return ()
    return (f"The random state of {len(states)} CUDA devices was saved, but there are {devices} here.",)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
