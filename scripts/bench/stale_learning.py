"""What stale tokens cost in learning: the recipe `parity` with several `rollout.max_staleness`, and with ways to weigh them.

    python scripts/bench/stale_learning.py [--seeds 0 1 2] [--cases k0 k1 k2 k3 k3-tis k3-none] [--lr 5e-4]

Each seed imitates once, as the recipe does. From that model each case takes the recipe's 25 steps of GRPO, and a server
of the embedded engine in another process samples meanwhile. `k3` clips the ratio to the weights that sampled, as all cases
without a suffix. `k3-tis` truncates it, and `k3-none` ignores that tokens are old. It prints the held-out shares of right
answers, and of each case the mean of all evaluations after the start (the learning curve's height) and the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rl4llm.compose import build_trainer
from rl4llm.config import CONFIGS, load_config
from rl4llm.extensions.servers.launch import launch

RECIPE = CONFIGS / "recipes" / "parity"
RECOMPUTED = {"algorithm.old_logprobs": "recomputed"}
WEIGHTS = {
    "": {},
    "tis": {**RECOMPUTED, "algorithm.correction": "tis"},
    "none": {  # weighs every token 1: nothing is below or above
        **RECOMPUTED,
        "algorithm.correction": "token_mask",
        "algorithm.correction_low": 0.0,
        "algorithm.correction_high": 1e30,
    },
}


def train(file: str, model: Path, data: Path, output: Path, **keys: object) -> list[float]:
    """Train, and return the held-out shares of right answers; [] without evaluations."""
    paths = {"model.path": str(model), "data.path": str(data), "output.dir": str(output)}
    with build_trainer(load_config(RECIPE / file, {**paths, **keys})) as trainer:
        trainer.train()
    log = output / "eval.jsonl"
    return [json.loads(line)["accuracy"] for line in log.read_text().splitlines()] if log.exists() else []


def keys_of(case: str) -> dict[str, object]:
    """Return the keys of a case such as k3-tis."""
    bound, _, weight = case.removeprefix("k").partition("-")
    return {"rollout.max_staleness": int(bound), **WEIGHTS[weight]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=["k0", "k1", "k2", "k3", "k3-tis", "k3-none"])
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args()


def main() -> None:
    options = parse()
    means: dict[str, list[float]] = {case: [] for case in options.cases}
    last: dict[str, list[float]] = {case: [] for case in options.cases}
    with tempfile.TemporaryDirectory() as temporary:
        directory, data = Path(temporary), Path(temporary) / "data"
        subprocess.run([sys.executable, RECIPE / "data.py", data], check=True)
        flags = [str(data / "model"), "--port", "0", "threads=1", "model.autocast=none"]
        with launch("embedded", flags, cpu=True) as server:
            more = {
                "training.lr": options.lr,
                "deterministic": False,
                "inference.name": "embedded",
                "inference.url": server.url,
            }
            for seed in options.seeds:
                imitated = directory / f"sft-{seed}"
                train("sft.yaml", data / "model", data / "answers.jsonl", imitated, seed=seed)
                for case in options.cases:
                    run, model = directory / f"{case}-{seed}", imitated / "model"
                    curve = train("train.yaml", model, data, run, seed=seed, **more, **keys_of(case))
                    means[case].append(statistics.fmean(curve[1:]))
                    last[case].append(curve[-1])
                    print(f"seed {seed} {case}: " + " ".join(f"{share:.1%}" for share in curve), flush=True)
    for case in options.cases:
        for name, found in (("mean", means[case]), ("last", last[case])):
            spread = f"{min(found):.1%} to {max(found):.1%}"
            print(f"{case} {name}: {statistics.fmean(found):.1%} ({spread})")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
