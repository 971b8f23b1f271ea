"""Draw a run that is training: lines of text, and curves beside each other, as one small SVG picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rl4llm.runtime.terminal import visible
from rl4llm.tracking.curve import BLUE, GREY, INK, ORANGE, smooth
from rl4llm.tracking.tracker import rounded

WIDTH, LINE, PANEL, LABELS, GAP = 720, 22, 150, 52, 18  # pixels; LABELS is the room left of a panel
MOST_POINTS = 300  # that are drawn of a curve
SMOOTHED_FROM = 8  # points
LONGEST = 92  # characters of a line of text


@dataclass(frozen=True, slots=True)
class Curve:
    """A named curve: steps and values, which may be NaN; one in percent has the axis 0 to 1, and is never smoothed."""

    name: str
    points: Sequence[tuple[int, float]]
    percent: bool = False


def draw(lines: Sequence[str], curves: Sequence[Curve], total_steps: int) -> str:
    """Return an SVG of the lines, the first of them bold, above the curves that have a point.

    A curve ends where the run is: the axis reaches to `total_steps`.
    """
    shown = [curve for curve in curves if any(math.isfinite(value) for _, value in curve.points)]
    top = LINE * len(lines) + 12
    height = top + (PANEL + 2 * LINE if shown else 0)
    parts = [
        _text(12, LINE * (number + 1), _cut(line), weight="bold" if number == 0 else "normal", size=14)
        for number, line in enumerate(lines)
    ]
    width = (WIDTH - GAP) / max(1, len(shown)) - LABELS
    for number, curve in enumerate(shown):
        left = LABELS + number * (width + LABELS)
        color = BLUE if curve.percent else ORANGE
        parts += _panel(curve, color, (left, top + LINE, width), total_steps)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" rx="6" fill="white"/>{"".join(parts)}</svg>'
    )


def _panel(curve: Curve, color: str, place: tuple[float, float, float], total_steps: int) -> list[str]:
    """Return the parts of one curve with its axes; `place` is left, top and width."""
    left, top, width = place
    points = [(step, value) for step, value in curve.points if math.isfinite(value)]
    low, high = (0.0, 1.0) if curve.percent else _range([value for _, value in points])
    last = max(total_steps, points[-1][0], 1)

    def at(step: float, value: float) -> str:
        return f"{left + width * step / last:.1f},{top + PANEL * (1 - (value - low) / (high - low)):.1f}"

    parts = [_text(left, top - 7, curve.name, color=color, weight="bold")]
    for value in (low, high):
        y = top + (PANEL if value == low else 0)
        label = f"{value:.0%}" if curve.percent else rounded(value, 3)
        parts.append(f'<path d="M{left:.1f} {y}h{width:.1f}" stroke="#E4E4E4"/>')
        parts.append(_text(left - 6, y + 4, label, color=GREY, anchor="end"))
    parts.append(_text(left, top + PANEL + 16, "0", color=GREY, anchor="middle"))
    parts.append(_text(left + width, top + PANEL + 16, f"step {last}", color=GREY, anchor="end"))
    few = _thinned(points)
    if curve.percent or len(points) < SMOOTHED_FROM:
        dots = [at(*point).split(",") for point in few]
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in dots]
        parts.append(_line([at(*point) for point in few], color, 2))
    else:
        calm = list(zip([step for step, _ in points], smooth([value for _, value in points]), strict=True))
        parts.append(_line([at(*point) for point in few], color, 1, opacity=0.35))
        parts.append(_line([at(*point) for point in _thinned(calm)], color, 2.2))
    return parts


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis: those of the values, or a little around values that are all equal."""
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-9 * max(1.0, abs(high)) else (low - 0.5, high + 0.5)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most about MOST_POINTS of the points, the last one among them."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return list(points[::-1][::stride][::-1])


def _line(points: Sequence[str], color: str, width: float, opacity: float = 1.0) -> str:
    path = " ".join(points)
    style = f'stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"'
    return f'<polyline points="{path}" fill="none" {style}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    color: str = INK,
    weight: str = "normal",
    anchor: str = "start",
    size: int = 12,
) -> str:
    style = f'fill="{color}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(visible(text))}</text>'
