"""Write a non-finite optimizer step, so that `rl4llm check` can compute it again.

failed/step-000012/
  update.json          the step, which model it would have moved, its images, and what was measured
  batches.safetensors  every tensor of every micro-batch
  model/               the weights that it started from
failed/step-000012-rank1/
  update.json, batches.safetensors of another rank
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.types import TrainBatch
from rl4llm.runs.run_dir import replace_directory

FACTS, BATCHES, MODEL = "update.json", "batches.safetensors", "model"


def save_update(
    directory: Path, batches: Sequence[TrainBatch], model: BaseBackend, facts: Mapping[str, Any]
) -> None:
    """Write an optimizer step into `directory`, whole or not at all."""

    def write(scratch: Path) -> None:
        (scratch / MODEL).mkdir()
        model.save(scratch / MODEL)
        tensors = {
            f"{number}/{name}": value.cpu()
            .clone()
            .contiguous()  # safetensors refuses two names for one tensor
            for number, batch in enumerate(batches)
            for name, value in batch.tensors().items()
        }
        save_file(tensors, scratch / BATCHES)
        # their pixels are in the run's images/
        images = [list(map(asdict, batch.images)) for batch in batches]
        (scratch / FACTS).write_text(json.dumps({"images": images, **facts}, indent=1))

    replace_directory(directory, write)
