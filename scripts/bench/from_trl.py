"""The same script with TRL and with rl4llm: runs examples/from_trl.py with both, and draws their learning curves.

    python scripts/bench/from_trl.py --peer-python ../trl/bin/python

Both start from the same small model, which is made first, and take the same number of steps, once with each seed. The script
itself notes the mean reward of each rollout; nothing of either library's logs is read. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from peer import parser_of

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SIDES = ("trl", "rl4llm")
COLOURS = {"trl": "#c2571a", "rl4llm": "#1f5fa8"}
WINDOW = 5  # steps, over which the bold lines are means


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--peer-python", required=True, help="the Python of an environment with torch, trl and datasets"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/from_trl"), help="finished runs in it are not run again"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "from_trl.png")
    return parser.parse_args()


def start_model(directory: Path) -> str:
    """The model that both start from."""
    sys.path.insert(0, str(EXAMPLES))
    from from_trl import rows  # type: ignore[attr-defined]  # of the example
    from shared import any_digit_model

    model = directory / "start" / "model"
    return str(model) if model.exists() else any_digit_model(model.parent, rows(2048, seed=1))


def curve(options: argparse.Namespace, side: str, seed: int, model: str) -> list[float]:
    """The mean reward of each rollout of one run."""
    output = options.dir / f"{side}-{seed}"
    if not (output / "curve.json").exists():
        python = options.peer_python if side == "trl" else sys.executable
        words = f"--library {side} --steps {options.steps} --seed {seed}".split()
        command = [python, str(EXAMPLES / "from_trl.py"), "--model", model, "--output", str(output), *words]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if side == "trl":
            environment.pop("PYTHONPATH", None)
        subprocess.run(command, check=True, env=environment)
    return json.loads((output / "curve.json").read_text())


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Each run as a thin line, the mean over runs and over the last few steps as a bold one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for side, runs in curves.items():
        steps = range(1, len(runs[0]) + 1)
        for run in runs:
            axes.plot(steps, run, color=COLOURS[side], alpha=0.25, linewidth=0.8)
        means = [statistics.mean(values) for values in zip(*runs, strict=True)]
        smooth = [statistics.mean(means[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(means))]
        axes.plot(
            steps, smooth, color=COLOURS[side], linewidth=2.2, label=f"{side}, mean of {len(runs)} seeds"
        )
    axes.set(
        xlabel="optimizer step",
        ylabel="training reward",
        ylim=(0, 1.02),
        title="examples/from_trl.py, one script",
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    options = parse()
    options.dir.mkdir(parents=True, exist_ok=True)
    model = start_model(options.dir)
    curves: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for seed in options.seeds:
        for side in SIDES:
            curves[side].append(curve(options, side, seed, model))
    for side, runs in curves.items():
        third = [statistics.mean(run[len(run) // 3 : 2 * len(run) // 3]) for run in runs]
        last = [statistics.mean(run[-10:]) for run in runs]
        first = [run[0] for run in runs]
        print(f"{side:7} first {_show(first)}  middle third {_show(third)}  last ten {_show(last)}")
    draw(curves, options.out)


def _show(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
