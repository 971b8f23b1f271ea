"""A tracker that writes metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rl4llm.tracking.glossary import find
from rl4llm.tracking.tracker import Row, Tracker

_IN_A_CELL = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "\\|", "\r": "", "\n": "<br>"})


class TensorBoardTracker(Tracker):
    """Writes into an events file; a resumed run hides what an earlier one wrote after `resume_step`.

    Every step is flushed, so that a killed run has all of its points.
    """

    def __init__(self, directory: Path, resume_step: int = -1):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow to import, and only wanted by some

        earlier = directory.is_dir() and any(directory.iterdir())
        self._writer = SummaryWriter(str(directory), purge_step=resume_step + 1 if earlier else None)

    def __str__(self) -> str:
        return "TensorBoard"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from torch.utils.tensorboard.summary import scalar  # noqa: PLC0415 - slow to import

        for name, value in metrics.items():
            point = scalar(name, float(value))
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
