"""The learning curve as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.run_dir import write_atomically
from rl4llm.tracking.jsonl import read_jsonl

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8C8C8C", "#222222"  # Okabe and Ito's, safe for the colour-blind
Points = tuple[list[int], list[float]]


def plot_learning_curve(
    metrics_jsonl: Path, eval_rows: Iterable[Mapping[str, Any]], png_path: Path, title: str = "Learning curve"
) -> None:
    """Draw held-out success (`accuracy` of the evaluations) above the training reward (`reward/mean`), over steps.

    Raises DataError for a damaged log and RunDirError when the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, needed once a run
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patheffects import withStroke  # noqa: PLC0415

    reward = _points(read_jsonl(metrics_jsonl), "reward/mean")
    success = _points(eval_rows, "accuracy")
    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    _draw_success(above, success, withStroke(linewidth=3, foreground="white"))
    _draw_reward(below, reward)
    below.set_xlabel("training step", color=INK)
    if not reward[0] and not success[0]:
        below.text(0.5, 0.5, "no finished step yet", transform=below.transAxes, ha="center", color=GREY)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(png_path, image.getvalue())


def smooth(values: Sequence[float]) -> list[float]:
    """A centred mean over about a twentieth of the points, at least five; near the ends over what there is."""
    reach = max(2, len(values) // 40)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _points(rows: Iterable[Mapping[str, Any]], name: str) -> Points:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None and math.isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _draw_success(axes: Any, points: Points, halo: Any) -> None:
    steps, values = points
    percent = [100 * value for value in values]
    axes.plot(steps, percent, "o-", color=BLUE, linewidth=1.8, markersize=5, clip_on=False, zorder=3)
    axes.set_ylim(0, 100)
    _style(axes, "held-out success (%)")
    for at in {0, len(percent) - 1} if percent else ():
        first = at == 0
        axes.annotate(
            f"{percent[at]:.1f} %",
            (steps[at], percent[at]),
            xytext=(9, -4) if first else (0, -17 if percent[at] > 85 else 9),
            textcoords="offset points",
            ha="left" if first else "right",
            color=BLUE,
            fontweight="bold",
            path_effects=[halo],
            zorder=4,
        )


def _draw_reward(axes: Any, points: Points) -> None:
    steps, values = points
    few = len(values) < 8
    axes.plot(steps, values, "o-" if few else "-", color=ORANGE, linewidth=1, alpha=1 if few else 0.35, label="each step")
    if not few:
        axes.plot(steps, smooth(values), color=ORANGE, linewidth=2.2, label="smoothed")
        axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    _style(axes, "training reward (mean)")


def _style(axes: Any, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, length=3)
    axes.xaxis.get_major_locator().set_params(integer=True)
