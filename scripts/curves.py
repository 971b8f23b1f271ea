"""Draw the held-out success of several runs of one recipe, for example of three seeds:

python scripts/curves.py PICTURE.png RUN RUN RUN [--title TITLE]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl4llm.tracking.curve import BLUE, INK, label_ends, style_axes
from rl4llm.tracking.tracker import read_jsonl


def successes(run: Path) -> dict[int, float]:
    """Return the held-out success of a run in percent, by step."""
    return {row["step"]: 100 * row["accuracy"] for row in read_jsonl(run / "eval.jsonl")}


def draw(runs: list[dict[int, float]], title: str, picture: Path) -> None:
    """Draw each run thin and the mean of the steps that all have thick, with its first and last value."""
    figure = Figure(figsize=(8, 3.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        label = "each seed" if number == 0 else None
        axes.plot(list(run), list(run.values()), color=BLUE, alpha=0.4, linewidth=1.2, label=label)
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    means = [statistics.fmean(run[step] for run in runs) for step in steps]
    axes.plot(steps, means, "o-", color=BLUE, linewidth=2.4, label="mean")
    label_ends(axes, steps, means, digits=0)
    style_axes(axes, "held-out success (%)")
    axes.set_ylim(0, 100)
    axes.set_xlabel("training step", color=INK)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(picture)


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
