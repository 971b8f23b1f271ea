"""What `rollout.one_step_off_policy` gains, which plays the next step's episodes while this one trains, by the clock.

    python scripts/bench/ahead.py --python ../sglang/bin/python

16 prompts of 64 tokens x 8 samples of forced length through a real SGLang on the CPU. Server and trainer have a core each,
as they would have separate devices. The two ways take turns, each in a separate run; the first step of a run, whose
episodes nobody played ahead, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES
from step import SAMPLES, STEPS, save_model, save_prompts
from verify import reward

from rl4llm import GRPOTrainer
from rl4llm.extensions.servers.launch import launch


def seconds(
    directory: Path, name: str, options: argparse.Namespace, **keys: Any
) -> tuple[float, dict[str, float]]:
    """The mean of the steps of a run behind its first, and the medians of their phases."""
    GRPOTrainer(
        str(directory / "model"),
        [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()],
        [reward],
        **{
            "rollout": {"prompts": PROMPTS, "group_size": SAMPLES, "max_tokens": options.new_tokens}
            | keys.pop("rollout"),
            "threads": 1,
            "output.dir": str(directory / name),
            "eval.every": 0,
            "checkpoint.every": 0,
            "max_steps": 1 + options.steps,
            **keys,
        },
    ).train()
    steps = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()][1:]
    phases = ("time/rollout", "time/update", "time/publish", "time/verify")
    shown = {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in phases}
    return statistics.fmean(step["time/step"] for step in steps), shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the environment that SGLang is installed in")
    parser.add_argument("--size", choices=sorted(SHAPES), default="30m")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = parse()
    transformers.utils.logging.disable_progress_bar()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Server and trainer need a core each, and there is one.")
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        prompts = save_model(options.size, directory / "model", PROMPTS * STEPS)
        save_prompts(prompts, directory / "prompts.jsonl")
        flags = ["--model-path", str(directory / "model"), "--port", "0", "--max-running-requests", "128"]
        os.sched_setaffinity(0, cores[1:2])  # what is started has it too
        with launch(
            "sglang", [*flags, "--max-total-tokens", "65536"], python=options.python, cpu=True
        ) as server:
            os.sched_setaffinity(0, cores[:1])
            for pair in range(options.pairs):
                taken = []
                for ahead in (False, True):
                    inference = {"name": "sglang", "url": server.url}
                    name = f"{pair}-{'ahead' if ahead else 'turns'}"
                    mean, phases = seconds(
                        directory, name, options, inference=inference, rollout={"one_step_off_policy": ahead}
                    )
                    taken.append(mean)
                    told = ", ".join(
                        f"{phase.partition('/')[2]} {value:.2f}" for phase, value in phases.items()
                    )
                    print(f"{name:8} {mean:7.2f} s a step: {told}")
                ratios.append(taken[0] / taken[1])
    print(f"turns over ahead: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
