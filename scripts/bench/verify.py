"""What it costs to prove the weights after every publish: the canary's share of whole steps of the trainer.

    python scripts/bench/verify.py
    python scripts/bench/verify.py --python ../sglang/bin/python

16 prompts of 64 tokens x 8 samples x 192 new tokens of forced length, so that a step trains on 128 x 256 tokens. The first
command uses the embedded engine, the second a real SGLang on the CPU. The share is `time/verify` over `time/step`, both as
the run logs them; the first step, in which everything is loaded for the first time, does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES
from step import SAMPLES, STEPS, save_model, save_prompts

from rl4llm import GRPOTrainer
from rl4llm.extensions.servers.launch import launch

NEW_TOKENS = 192


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(completion) % 2) for completion in completions]


def train(directory: Path, options: argparse.Namespace, inference: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    GRPOTrainer(
        str(directory / "model"),
        [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()],
        [reward],
        **{
            "inference": inference,
            "rollout": {"prompts": PROMPTS, "group_size": SAMPLES, "max_tokens": NEW_TOKENS},
            "threads": options.threads,
            "output.dir": str(directory / "run"),
            "eval.every": 0,
            "checkpoint.every": 0,
            "max_steps": 1 + options.steps,
        },
    ).train()
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", help="of the environment that SGLang is installed in; left out, the embedded engine"
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="30m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    transformers.utils.logging.disable_progress_bar()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts = save_model(options.size, directory / "model", PROMPTS * STEPS)
        save_prompts(prompts, directory / "prompts.jsonl")
        inference: dict[str, Any] = {"name": "local"}
        if options.python:
            flags = ["--model-path", str(directory / "model"), "--port", "0", "--max-running-requests", "128"]
            server = stack.enter_context(
                launch("sglang", [*flags, "--max-total-tokens", "65536"], python=options.python, cpu=True)
            )
            inference = {"name": "sglang", "url": server.url}
        steps = train(directory, options, inference)[1:]
    if not steps:
        raise SystemExit("The run was stopped before its second step.")
    for name in ("time/step", "time/publish", "time/verify"):
        print(f"{name:13} median {statistics.median(step[name] for step in steps):9.3f} s")
    shares = [step["time/verify"] / step["time/step"] for step in steps]
    print(
        f"the canary's share of a step: {statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%})"
    )


if __name__ == "__main__":
    main()
