"""Read a failed optimizer step that `rl4llm.runs.failed_update` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rl4llm.core.errors import DataError
from rl4llm.core.images import Image
from rl4llm.core.types import TrainBatch
from rl4llm.runs.failed_update import BATCHES, FACTS, MODEL


@dataclass(frozen=True, slots=True)
class FailedUpdate:
    """What `save_update` wrote. `facts` holds step, model, algorithm (its state) and metrics."""

    batches: list[TrainBatch]
    facts: dict[str, Any]
    model: Path


def load_update(directory: Path) -> FailedUpdate:
    """Read one back; raises DataError when there is none."""
    accepted = (
        "Accepted: a directory such as runs/NAME/failed/step-000012, which a run writes when it stops for losses that "
        "are not finite."
    )
    if not directory.is_dir():
        raise DataError(f"{directory} holds no optimizer step: there is no such directory. {accepted}")
    missing = [name for name in (FACTS, BATCHES) if not (directory / name).is_file()]
    if missing:
        raise DataError(
            f"{directory} holds no optimizer step: it has no file {' and no file '.join(missing)}. {accepted}"
        )
    try:
        facts = json.loads((directory / FACTS).read_text())
        batches = _batches(load_file(directory / BATCHES), facts["images"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"{directory} holds no optimizer step that can be read: {type(error).__name__}: {error}. {accepted}"
        ) from error
    first = directory.with_name(directory.name.partition("-rank")[0])  # whose directory has the model
    return FailedUpdate(batches, facts, first / MODEL)


def _batches(
    tensors: Mapping[str, Tensor], images: Sequence[Sequence[Mapping[str, Any]]]
) -> list[TrainBatch]:
    return [
        TrainBatch.of(
            {
                name.partition("/")[2]: value
                for name, value in tensors.items()
                if name.startswith(f"{number}/")
            },
            tuple(Image(**image) for image in seen),
        )
        for number, seen in enumerate(images)
    ]
