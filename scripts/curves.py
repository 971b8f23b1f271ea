"""Draw the held-out success of several runs of one recipe, for example of three seeds:

python scripts/curves.py PICTURE.png RUN RUN RUN [--title TITLE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl4llm.tracking.curve import INK, label_ends, style_axes
from rl4llm.tracking.tracker import read_jsonl

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
Curve = dict[int, float]  # percent by step


def successes(run: Path) -> Curve:
    """Return the held-out success of a run in percent, by step."""
    return {row["step"]: 100 * row["accuracy"] for row in read_jsonl(run / "eval.jsonl")}


def picture(curves: Mapping[str, tuple[Sequence[Curve], Curve]], label: str, title: str, dpi: int) -> Any:
    """Draw the seeds of each curve thin and its mean thick, a colour for each; return the axes, without a legend."""
    figure = Figure(figsize=(8, 3.2), dpi=dpi, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, (seeds, mean)), colour in zip(curves.items(), COLOURS, strict=False):
        for seed in seeds:
            axes.plot(list(seed), list(seed.values()), color=colour, alpha=0.35, linewidth=1.1)
        axes.plot(list(mean), list(mean.values()), "o-", color=colour, linewidth=2.2, label=name)
    style_axes(axes, label)
    axes.set_ylim(0, 100)
    axes.set_xlabel("training step", color=INK)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    return axes


def draw(runs: list[Curve], title: str, path: Path) -> None:
    """Draw the mean of the steps that all runs have, with its first and last value."""
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    means = {step: statistics.fmean(run[step] for run in runs) for step in steps}
    axes = picture({"mean": (runs, means)}, "held-out success (%)", title, dpi=150)
    label_ends(axes, steps, list(means.values()), digits=0)
    axes.figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    runs = [successes(run) for run in options.runs]
    draw(runs, options.title, options.picture)
    for run, values in zip(options.runs, runs, strict=True):
        print(f"{run}: {', '.join(f'step {step}: {value:.1f} %' for step, value in values.items())}")


if __name__ == "__main__":
    main()
