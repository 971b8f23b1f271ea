"""Draw the learning curve as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.runs.run_dir import write_atomically
from rl4llm.tracking.tracker import read_jsonl

BLUE, ORANGE, GREY, INK = (
    "#0072B2",
    "#D55E00",
    "#8C8C8C",
    "#222222",
)  # Okabe and Ito's, safe for the colour-blind


def plot_learning_curve(
    metrics_jsonl: Path, eval_rows: Iterable[Mapping[str, Any]], png_path: Path, title: str = "Learning curve"
) -> bool:
    """Draw held-out success (`accuracy` of the evaluations) above the training reward (`reward/mean`), over steps.

    A log with fewer than two points of one of them gets one panel; of both, nothing is drawn and the result is False.
    Raise DataError for a damaged log and RunDirError when the picture cannot be written.
    """
    success = _points(eval_rows, "accuracy")
    reward = _points(read_jsonl(metrics_jsonl), "reward/mean")
    panels = [
        (draw, points)
        for draw, points in ((_draw_success, success), (_draw_reward, reward))
        if len(points[0]) > 1
    ]
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, needed once a run
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 0.6 + 2.5 * len(panels)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, parse_math=False, fontweight="bold", color=INK, x=0.01, ha="left")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (draw, points) in zip(rows, panels, strict=True):
        draw(axes, *points)
    rows[-1].set_xlabel("training step", color=INK)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(png_path, image.getvalue())
    return True


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred mean over about a twentieth of the points, at least five; fewer near the ends."""
    reach = max(2, len(values) // 40)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _points(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [
        (row["step"], row[name]) for row in rows if row.get(name) is not None and math.isfinite(row[name])
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _draw_success(axes: Any, steps: list[int], values: list[float]) -> None:
    percent = [100 * value for value in values]
    axes.plot(steps, percent, "o-", color=BLUE, linewidth=1.8, markersize=5, clip_on=False, zorder=3)
    axes.set_ylim(0, 100)
    label_ends(axes, steps, percent, digits=1)
    style_axes(axes, "held-out success (%)")


def _draw_reward(axes: Any, steps: list[int], values: list[float]) -> None:
    few = len(values) < 8
    axes.plot(
        steps,
        values,
        "o-" if few else "-",
        color=ORANGE,
        linewidth=1,
        alpha=1 if few else 0.35,
        label="each step",
    )
    if not few:
        axes.plot(steps, smooth(values), color=ORANGE, linewidth=2.2, label="smoothed")
        axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    style_axes(axes, "training reward (mean)")


def label_ends(axes: Any, steps: Sequence[int], percent: Sequence[float], digits: int) -> None:
    """Write the first value of a curve on its left and the last on its right, where no line can be."""
    axes.margins(x=0.15)
    for at, beside, align in ((0, -9, "right"), (-1, 9, "left")):
        axes.annotate(
            f"{percent[at]:.{digits}f} %",
            (steps[at], percent[at]),
            xytext=(beside, 0),
            textcoords="offset points",
            ha=align,
            va="bottom" if percent[at] < 5 else "center",
            color=BLUE,
            fontweight="bold",
        )


def style_axes(axes: Any, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, length=3)
    axes.xaxis.get_major_locator().set_params(integer=True)
