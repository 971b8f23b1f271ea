"""The curves of a run: their points, the mean of several runs, as a line of text, and as a picture."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Points = Sequence[tuple[int, float]]  # by step

BLUE, ORANGE, GREY, INK = (
    "#0072B2",
    "#D55E00",
    "#8C8C8C",
    "#222222",
)  # Okabe and Ito's, safe for the colour-blind
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 40
FEW = 8  # points; a curve with fewer is not smoothed


def points(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return the steps and finite values of a metric, in the order of steps; the last row of a step counts."""
    values = {
        int(row["step"]): float(row[name])
        for row in rows
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    }
    return sorted(values.items())


def mean(curves: Sequence[Points]) -> list[tuple[int, float]]:
    """Return the mean of several runs at each step, over those that have it."""
    values: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        values.setdefault(step, []).append(value)
    return sorted((step, statistics.fmean(each)) for step, each in values.items())


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred mean over about a twentieth of the points, at least five; fewer near the ends."""
    reach = max(2, len(values) // 40)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def bars(curve: Points) -> str:
    """Return a curve as bars, means of about as many points each.

    >>> bars([(1, 0.0), (2, 0.5), (3, 1.0)])
    '▁▅█ 0.000 → 1.000  steps 1 to 3'
    """
    count = len(curve)
    columns = min(count, SPARK_COLUMNS)
    edges = [count * column // columns for column in range(columns + 1)]
    means = [statistics.fmean(value for _, value in curve[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    line = "".join(SPARKS[round((mean - low) / (high - low or 1) * (len(SPARKS) - 1))] for mean in means)
    return f"{line} {means[0]:.3f} → {means[-1]:.3f}  steps {curve[0][0]} to {curve[-1][0]}"


def picture(rows: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]], title: str) -> bytes:
    """Return a PNG of held-out success (`accuracy`) above the training reward, or the loss of a run without one.

    A curve with fewer than two points has no panel; without any the result is empty.
    """
    rows = list(rows)
    learned = next((name for name in ("reward/mean", "loss") if points(rows, name)), "loss")
    success = [(step, 100 * share) for step, share in points(evaluations, "accuracy")]
    panels = {"held-out success (%)": success, f"training {learned.partition('/')[0]}": points(rows, learned)}
    panels = {label: curve for label, curve in panels.items() if len(curve) > 1}
    if not panels:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, needed once a run
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 0.6 + 2.5 * len(panels)), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, parse_math=False, fontweight="bold", color=INK, x=0.01, ha="left")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, curve) in zip(grid, panels.items(), strict=True):
        steps, values = zip(*curve, strict=True)
        held_out = curve is success
        few = held_out or len(curve) < FEW
        color = BLUE if held_out else ORANGE
        axes.plot(
            steps,
            values,
            "o-" if few else "-",
            color=color,
            linewidth=1.8 if few else 1,
            alpha=1 if few else 0.35,
        )
        if not few:
            axes.plot(steps, smooth(values), color=color, linewidth=2.2)
        if held_out:
            axes.set_ylim(-2, 102)
        style_axes(axes, label)
    grid[-1].set_xlabel("training step", color=INK)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def style_axes(axes: Any, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, length=3)
    axes.xaxis.get_major_locator().set_params(integer=True)
