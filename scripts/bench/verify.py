"""What it costs to prove the weights after every publish: the canary's share of whole steps of the trainer.

    python scripts/bench/verify.py
    python scripts/bench/verify.py --python ../sglang/bin/python

16 prompts of 64 tokens x 8 samples x 192 new tokens of forced length, so that a step trains on 128 x 256 tokens. The first
command uses the embedded engine, the second a real SGLang on the CPU. The share is `time/verify` over `time/step`, both as
the run logs them; the first step, in which everything is loaded for the first time, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES
from peer import parser_of, spread
from step import STEPS, save_model, sglang_of, trainer_of

from rl4llm.tracking.tracker import read_jsonl

NEW_TOKENS = 192


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
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
        inference: dict[str, Any] = {"name": "local"}
        if options.python:
            server = stack.enter_context(sglang_of(directory / "model", options.python))
            inference = {"name": "sglang", "url": server.url}
        keys = {"inference": inference, "threads": options.threads, "max_steps": 1 + options.steps}
        trainer_of(directory, prompts, {"max_tokens": NEW_TOKENS}, **keys).train()
        steps = read_jsonl(directory / "run" / "metrics.jsonl")[1:]
    if not steps:
        raise SystemExit("The run was stopped before its second step.")
    for name in ("time/step", "time/publish", "time/verify"):
        print(f"{name:13} median {statistics.median(step[name] for step in steps):9.3f} s")
    shares = [step["time/verify"] / step["time/step"] for step in steps]
    print(f"the canary's share of a step: {spread(shares, '.2%')}")


if __name__ == "__main__":
    main()
