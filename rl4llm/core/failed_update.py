"""An optimizer step that could not be taken, written down so that it can be looked at again.

failed/step-000012/
  update.json          the step, which model it would have moved, and what was measured
  batches.safetensors  every tensor of every micro-batch
  model/               the weights that it started from
failed/step-000012-rank1/
  update.json, batches.safetensors of another rank
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.errors import DataError
from rl4llm.core.run_dir import replace_directory
from rl4llm.core.types import TrainBatch

FACTS, BATCHES, MODEL = "update.json", "batches.safetensors", "model"


@dataclass(frozen=True, slots=True)
class FailedUpdate:
    """What `save_update` wrote. `facts` holds step, model, algorithm (its state) and metrics."""

    batches: list[TrainBatch]
    facts: dict[str, Any]
    model: Path


def save_update(directory: Path, batches: Sequence[TrainBatch], model: BaseBackend, facts: Mapping[str, Any]) -> None:
    """Write an optimizer step into `directory`, whole or not at all."""

    def write(scratch: Path) -> None:
        (scratch / MODEL).mkdir()
        model.save(scratch / MODEL)
        tensors = {
            f"{number}/{name}": value.cpu().clone().contiguous()  # safetensors refuses two names for one tensor
            for number, batch in enumerate(batches)
            for name, value in batch.tensors().items()
        }
        save_file(tensors, scratch / BATCHES)
        (scratch / FACTS).write_text(json.dumps({"batches": len(batches), **facts}, indent=1))

    replace_directory(directory, write)


def load_update(directory: Path) -> FailedUpdate:
    """Read one back; raises DataError when there is none."""
    try:
        facts = json.loads((directory / FACTS).read_text())
        batches = _batches(load_file(directory / BATCHES), facts["batches"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"{directory} holds no optimizer step that could not be taken: {error!r}. Accepted: a directory such as "
            "runs/NAME/failed/step-000012, which a run writes when it stops for losses that are not finite."
        ) from error
    first = directory.with_name(directory.name.partition("-rank")[0])  # whose directory has the model
    return FailedUpdate(batches, facts, first / MODEL)


def _batches(tensors: Mapping[str, Tensor], count: int) -> list[TrainBatch]:
    return [
        TrainBatch.of({name.partition("/")[2]: value for name, value in tensors.items() if name.startswith(f"{number}/")})
        for number in range(count)
    ]
