"""What a key does to learning: SmolLM2-135M-Instruct learns the sums of the recipe `sums`, with several values of each key.

    python scripts/bench/learning.py MODEL rate group staleness [--seeds 0 1 2] [--at-once 1] [--out FILE]
    python scripts/bench/learning.py --table FILE                # what FILE holds, in Markdown
    python scripts/bench/learning.py --draw FILE PICTURE.png

MODEL is its directory. A case changes the recipe in the keys that `CASES` names; each case and seed is a run of the recipe's
steps. On a GPU products are bf16, on a CPU float32. The cases of `staleness` have a server of the embedded engine beside the
trainer, on the same device. A finished run is a JSON line, and the next call with the same FILE leaves it out. The table has
of each case held-out success at the end, and its mean over the evaluations after the start, from the least to the most of
the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from peer import parser_of

RECOMPUTED = {"algorithm.old_logprobs": "recomputed"}
WEIGHTS: dict[str, dict[str, Any]] = {
    "": {},
    ", sampled": {"algorithm.old_logprobs": "sampled"},
    ", TIS": {**RECOMPUTED, "algorithm.correction": "tis"},
    ", none": {  # weighs every token 1: nothing is below or above
        **RECOMPUTED,
        "algorithm.correction": "token_mask",
        "algorithm.correction_low": 0.0,
        "algorithm.correction_high": 1e30,
    },
}


def _lora(lr: float) -> dict[str, Any]:
    return {"model.lora.rank": 16, "training.lr": lr}


SHOWN = ("reward/mean", "mismatch/mean", "time/step")
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "base": {"recipe": {}},
    "staleness": {
        f"{bound}{weight}": {"rollout.max_staleness": bound, **WEIGHTS[weight]}
        for weight, bounds in (("", (0, 2, 8)), (", sampled", (1, 2, 3, 8)), (", TIS", (3,)), (", none", (3,)))
        for bound in bounds
    },
    "rate": {f"{lr:.0e}": {"training.lr": lr} for lr in (1e-6, 3e-6, 3e-5, 1e-4)},
    "rate-lora": {f"{lr:.0e}": _lora(lr) for lr in (1e-5, 1e-4, 2e-4, 1e-3)},
    "group": {
        f"{prompts} x {size}": {"rollout.prompts": prompts, "rollout.group_size": size}
        for prompts, size in ((32, 2), (16, 4), (4, 16), (2, 32))
    },
    "updates": {
        "epochs 2": {"training.passes_per_rollout": 2}, "epochs 4": {"training.passes_per_rollout": 4},
        "updates 4": {"training.updates_per_rollout": 4},
        "epochs 4, clip_high 0.28": {"training.passes_per_rollout": 4, "algorithm.clip_high": 0.28},
    },
    "KL": {str(coef): {"algorithm.kl_coef": coef} for coef in (0.001, 0.01, 0.1)},
    "temperature": {str(value): {"rollout.temperature": value} for value in (0.6, 1.3)},
    "tokens": {str(count): {"rollout.max_tokens": count} for count in (8, 16)},
    "dtype": {"bfloat16": {"model.dtype": "bfloat16"}, "bfloat16, 1e-6": {"model.dtype": "bfloat16", "training.lr": 1e-6}},
}  # fmt: skip


@cache
def served(model: str) -> Any:
    """Return the server of this process, which ends with it."""
    from rl4llm.extensions.servers.launch import launch

    cpu = not torch.cuda.is_available()
    flags = ["threads=1", "model.autocast=none"] if cpu else []
    return launch("embedded", [model, "--port", "0", *flags], cpu=cpu).__enter__()


def run(model: str, data: str, steps: int, sweep: str, case: str, seed: int) -> dict[str, Any]:
    """Train one case with one seed, and return its curve."""
    from rl4llm.compose import build_trainer
    from rl4llm.config import CONFIGS, load_config

    warnings.simplefilter("ignore")
    keys = dict(CASES[sweep][case])
    if "rollout.max_staleness" in keys:
        keys |= {"inference.name": "embedded", "inference.url": served(model).url}
    if torch.cuda.is_available():
        keys = {"model.autocast": "none" if "model.dtype" in keys else "auto"} | keys
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        paths = {"model.path": model, "data.path": data, "output.dir": str(output), "output.console": "quiet"}
        more = {"seed": seed, "threads": 1, "deterministic": False, "max_steps": steps}
        with build_trainer(
            load_config(CONFIGS / "recipes/sums/train.yaml", {**paths, **more, **keys})
        ) as trainer:
            trainer.train()
        evals, lines = (
            [json.loads(line) for line in (output / name).read_text().splitlines()]
            for name in ("eval.jsonl", "metrics.jsonl")
        )
    shown = {name: [round(step[name], 6) for step in lines if name in step] for name in SHOWN}
    curve, seconds = [(row["step"], row["accuracy"]) for row in evals], round(time.monotonic() - begin, 1)
    return {"sweep": sweep, "case": case, "seed": seed, "curve": curve, "seconds": seconds} | shown


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sweep(options: argparse.Namespace) -> None:
    """Run all cases and seeds that are not in the file, several at once."""
    from rl4llm.extensions.quickstart.sums import write_sums

    done = {(row["sweep"], row["case"], row["seed"]) for row in rows_of(options.out)}
    jobs = [(name, case, seed) for name in options.sweeps for case in CASES[name] for seed in options.seeds]
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as data, ProcessPoolExecutor(options.at_once, spawn) as pool:
        write_sums(Path(data))
        asked = {
            pool.submit(run, options.model, data, options.steps, *job): job for job in jobs if job not in done
        }
        for future in as_completed(asked):
            if error := future.exception():
                print(*asked[future], repr(error)[:600], flush=True)
                continue
            row = future.result()
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(*asked[future], row["curve"], row["seconds"], flush=True)


def by_case(file: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield sweep, case and its runs, in the order of `CASES`."""
    rows = rows_of(file)
    for name, cases in CASES.items():
        for case in cases:
            if found := [row for row in rows if (row["sweep"], row["case"]) == (name, case)]:
                yield name, case, found


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})".replace("%", " %")


def table(file: Path) -> str:
    rows = ["| | | last evaluation | mean after the start | seeds |", "|---|---|---|---|---|"]
    for name, case, runs in by_case(file):
        last = [row["curve"][-1][1] for row in runs]
        mean = [statistics.fmean(share for _, share in row["curve"][1:]) for row in runs]
        rows.append(f"| {name} | {case} | {spread(last)} | {spread(mean)} | {len(runs)} |")
    return "\n".join(rows)


def draw(file: Path, picture: Path) -> None:
    """Draw a panel for each sweep: of each case the mean of the seeds, and a band from least to most."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = list(by_case(file))
    names = list(dict.fromkeys(name for name, *_ in found if name != "base"))
    layout: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    lines = -(-len(names) // 3)
    figure, axes = pyplot.subplots(lines, 3, figsize=(12, 2.6 * lines), **layout)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        for _, case, runs in [
            item for item in found if item[0] in (name, "base" if name != "staleness" else name)
        ]:
            steps = [step for step, _ in runs[0]["curve"]]
            shares = list(zip(*([share for _, share in row["curve"]] for row in runs), strict=True))
            (line,) = axis.plot(steps, list(map(statistics.fmean, shares)), label=case, linewidth=1.4)
            axis.fill_between(
                steps, list(map(min, shares)), list(map(max, shares)), alpha=0.12, color=line.get_color()
            )
        axis.set_title(name, fontsize=10)
        axis.legend(fontsize=7, framealpha=0.5)
    figure.supxlabel("step")
    figure.supylabel("held-out right answers")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("learning.jsonl"))
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("FILE", "PICTURE"))
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
    elif options.draw:
        draw(*options.draw)
    elif options.model is None:
        parser.error("MODEL is missing.")
    else:
        options.sweeps = options.sweeps or list(CASES)
        if unknown := [name for name in options.sweeps if name not in CASES]:
            parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(CASES)}.")
        sweep(options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
