"""The metrics of a run as a table."""

from __future__ import annotations

from typing import Any, Self

from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.tracker import read_jsonl, rounded

SHOWN = (
    "step", "reward/mean", "loss", "eval/accuracy", "eval/loss", "completion_length/mean", "truncated", "kl", "grad_norm",
    "tokens/s", "time/step",
)  # fmt: skip
FIRST, LAST = 3, 5  # rows that are shown


class MetricsTable(list[dict[str, Any]]):
    """A row of metrics for each step; those of an evaluation have names that begin with "eval/".

    >>> pandas.DataFrame(trainer.history).set_index("step")["reward/mean"].plot()

    Where it is displayed, it shows the metrics that matter most, of the first and the last steps.
    """

    @classmethod
    def of(cls, run: RunDir) -> Self:
        """Read the metrics of a run; one that has not started has no rows."""
        rows: dict[int, dict[str, Any]] = {}
        for row in read_jsonl(run.metrics_file):
            rows.setdefault(row["step"], {}).update(row)
        return cls(rows.values())

    def __repr__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        return "\n".join([*aligned, self._summary()])

    def _repr_html_(self) -> str:
        head, *body = ("".join(f"<td>{cell}</td>" for cell in line) for line in self._cells())
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        heads = head.replace("td>", "th>")
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table><p>{self._summary()}</p>"

    def _cells(self) -> list[list[str]]:
        """Return the header and the rows to show."""
        names = [name for name in SHOWN if any(row.get(name) is not None for row in self)]
        rows = [[_cell(row.get(name)) for name in names] for row in self]
        if len(rows) > FIRST + LAST + 1:
            rows[FIRST:-LAST] = [["..."] * len(names)]
        return [names, *rows]

    def _summary(self) -> str:
        names = {name for row in self for name in row} - {"step"}
        return f"{len(self)} rows, {len(names)} metrics. pandas.DataFrame(trainer.history) has all."


def _cell(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else rounded(value)
