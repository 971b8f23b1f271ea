"""The global random number generators, as values that JSON can hold.

rl4llm does not draw from them (see `rl4llm.runtime.seeds`), but environments and rewards of users do, and dropout.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rl4llm.core.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator, as values that JSON can hold."""
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "python": [version, list(numbers), gauss],
        "numpy": {
            **legacy,
            "state": {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])},
        },
    }


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Restore what `rng_state` returned. Return a message for each part that could not be, such as that of missing GPUs.

    Raises CheckpointError for a damaged state.
    """
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        inner = state["numpy"]["state"]
        key = np.array(inner["key"], dtype=np.uint32)
        np.random.set_state({**state["numpy"], "state": {"key": key, "pos": inner["pos"]}})
        torch.set_rng_state(_tensor(state["torch"]))
        saved, devices = state["cuda"], torch.cuda.device_count()
        for device, text in enumerate(saved[:devices]):
            torch.cuda.set_rng_state(_tensor(text), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"A saved random state is damaged ({type(error).__name__}: {error})."
        ) from error
    if len(saved) == devices:
        return ()
    return (f"The random state of {len(saved)} CUDA devices was saved, but this machine has {devices}.",)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
