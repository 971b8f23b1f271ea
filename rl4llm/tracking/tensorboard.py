"""A tracker that writes metrics for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams, scalar

from rl4llm.core.redact import redacted
from rl4llm.tracking.glossary import find
from rl4llm.tracking.tracker import Row, TrackedRun, Tracker

_IN_A_CELL = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "\\|", "\r": "", "\n": "<br>"})


SCORES = ("eval/accuracy", "eval/reward/mean", "train/accuracy", "reward/mean")
"""Tags that TensorBoard compares runs by, beside their hyper-parameters."""


class TensorBoardTracker(Tracker):
    """Writes an events file into the directory of a run; a resumed run hides what an earlier one wrote after `resume_step`.

    `config` becomes the run's hyper-parameters. Every step is flushed, so that a killed run has all of its points.
    """

    def __init__(self, run: TrackedRun):
        earlier = any(run.directory.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(run.directory), purge_step=run.resume_step + 1 if earlier else None)
        if run.config:
            swept = {key: value for key, value in run.config.items() if f"{key}=" in run.directory.name}
            self._describe(redacted(swept | dict(run.config)))  # the table opens with the first

    def __str__(self) -> str:
        return "TensorBoard"

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Write the hyper-parameters into this events file; SummaryWriter.add_hparams would begin another directory."""
        values = {key: _value(value) for key, value in config.items() if value is not None}
        for summary in hparams(values, dict.fromkeys(SCORES, 0.0))[:2]:  # the third declares the run finished
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            point = scalar(tag_of(name), float(value))
            if metric := find(name):  # in the glossary
                point.value[0].metadata.summary_description = str(metric)
            self._writer._get_file_writer().add_summary(point, step)
        self._writer.flush()

    def picture(self, step: int, name: str, file: Path) -> None:
        from matplotlib.image import imread  # noqa: PLC0415 - slow to import, and drew the picture

        self._writer.add_image(name, imread(file)[..., :3], step, dataformats="HWC")
        self._writer.flush()

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._writer.add_text(name, as_markdown(rows), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def tag_of(name: str) -> str:
    """Return the tag of a metric: its name, in the group `train` if the name has no group.

    >>> tag_of("accuracy"), tag_of("eval/accuracy")
    ('train/accuracy', 'eval/accuracy')
    """
    return name if "/" in name else f"train/{name}"


def _value(value: Any) -> str | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) else json.dumps(value, default=str)


def as_markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table of rows; `<br>` separates the lines of a cell.

    >>> as_markdown([{"said": "a|b", "reward": 1.0}])
    '| said | reward |\\n|---|---|\\n| a\\\\|b | 1.0 |'
    """
    lines = [list(rows[0]), *(row.values() for row in rows)]
    head, *body = (
        "| " + " | ".join(str(value).translate(_IN_A_CELL) for value in line) + " |" for line in lines
    )
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
