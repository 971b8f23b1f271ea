"""Metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes scalars into an events file; a resumed run hides what an earlier one wrote after `resume_step`.

    Every step is flushed, so that a killed run has all of its points.
    """

    def __init__(self, directory: Path, resume_step: int = -1):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow to import, and only wanted by some

        earlier = directory.is_dir() and any(directory.iterdir())
        self._writer = SummaryWriter(str(directory), purge_step=resume_step + 1 if earlier else None)

    def __str__(self) -> str:
        return "TensorBoard"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
