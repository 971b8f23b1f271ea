"""What `rollout.max_staleness` gains, by the clock: 0 takes turns, above 0 episodes begin while earlier steps train.

    python scripts/bench/staleness.py [--staleness 0 1 4] [--median-tokens 200 --new-tokens 2000] [--tool-s 1.0]

A server of the embedded engine (or, with `--python`, a real SGLang on the CPU) and the trainer have a core each, as they
would have separate devices; a GPU they share. The bounds take turns, each in a separate run. The same `--steps` steps of
each run count, after as many that episodes begin as early as they can, and before the last ones, during which no further
episodes begin.

With `--median-tokens`, lengths are log-normal (sigma 1, 20 to `--new-tokens`). With `--tool-s`, the environment answers the
first turn after a log-normal time with that median in seconds (sigma 1, at most 60 times the median), and a second turn
follows. Lengths and times depend on the episode alone, so that all runs have the same ones. With `--keep-cache`, unfinished
answers continue with the cache of older weights; `mismatch/mean` shows what that makes of their log-probs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from models import PROMPTS, SHAPES
from peer import parser_of, ratios, spread
from step import NEW_TOKENS, SAMPLES, save_model

from rl4llm import GRPOTrainer
from rl4llm.core.base_env import LLM, BaseMDPEnv, ChatMessage, SampleState
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.launch import ServerProcess, launch
from rl4llm.tracking.tracker import read_jsonl

SHORTEST = 20  # tokens of a log-normal answer
MEANS = ("time/step", "time/rollout", "time/update", "time/publish", "time/verify", "mismatch/mean")


class Task(BaseMDPEnv):
    """Length of the answer and time of the tool depend on the seed of the sample alone."""

    median_s = 0.0
    median_tokens = 0
    continue_truncated = True

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        if self.median_tokens:
            length = random.Random(sample.session).lognormvariate(math.log(self.median_tokens), 1.0)
            longest = sampling_params.max_tokens
            sampling_params = sampling_params.replace(max_tokens=min(max(SHORTEST, round(length)), longest))
        await super()._run_episode(sample, llm, sampling_params)

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        if not self.median_s or sample.current_step > 1:
            return []
        seconds = random.Random(sample.session).lognormvariate(math.log(self.median_s), 1.0)
        await asyncio.sleep(min(seconds, 60 * self.median_s))
        return [ChatMessage("user", "Go on.")]


def warm_up(options: argparse.Namespace) -> int:
    return 1 + max(options.staleness)


def costless(completions: list[Any], **columns: Any) -> list[float]:
    """Return rewards that take no time."""
    return [float(len(completion) % 2) for completion in completions]


def train(
    model: Path, prompts: list[str], output: Path, bound: int, options: argparse.Namespace, **inference: Any
) -> None:
    """Train with rollouts of the benchmark's shape."""
    shape = {
        "prompts": options.prompts,
        "group_size": SAMPLES,
        "max_tokens": options.new_tokens,
        "max_staleness": bound,
    }
    turns = 2 if options.tool_s else 1
    keys = {"training.passes_per_rollout": options.passes, "env.max_steps": turns, "threads": 1}
    keys |= {"model.autocast": "auto" if torch.cuda.is_available() else "none", "output.dir": str(output)}
    keys |= {"eval.every": 0, "checkpoint.every": 0, "max_steps": warm_up(options) + options.steps + bound}
    rows = [{"prompt": prompt, "ground_truth": ""} for prompt in prompts]
    GRPOTrainer(str(model), rows, [costless], env=Task, rollout=shape, inference=inference, **keys).train()


def means_of(output: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the means of what `MEANS` names, over the steps that count and measured it."""
    rows = [row for row in read_jsonl(output / "metrics.jsonl") if "time/step" in row]
    steps = rows[warm_up(options) :][: options.steps]
    found = {name: [step[name] for step in steps if name in step] for name in MEANS}
    return {name: statistics.fmean(values) for name, values in found.items() if values}


def start(model: Path, options: argparse.Namespace) -> ServerProcess:
    """Return the server, not started yet."""
    if options.python is None and torch.cuda.is_available():
        return launch("embedded", [str(model), "--port", "0", "model.autocast=auto"])
    if options.python is None:
        return launch("embedded", [str(model), "--port", "0", "threads=1", "model.autocast=none"], cpu=True)
    flags = [
        "--model-path",
        str(model),
        "--port",
        "0",
        "--max-running-requests",
        "128",
        "--max-total-tokens",
        "65536",
    ]
    return launch("sglang", flags, python=options.python, cpu=True)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--python", help="of the environment that SGLang is installed in")
    parser.add_argument("--size", choices=sorted(SHAPES), default="5m")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step, with 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--passes", type=int, default=1, help="training.passes_per_rollout")
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tool-s", type=float, default=0.0, help="median of the time that a tool takes")
    parser.add_argument("--median-tokens", type=int, default=0, help="median of the lengths of answers")
    parser.add_argument("--keep-cache", action="store_true", help="inference.keep_cache=true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    Task.median_s, Task.median_tokens = options.tool_s, options.median_tokens
    transformers.utils.logging.disable_progress_bar()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Server and trainer need a core each, and there is one.")
    half = len(cores) // 2 if torch.cuda.is_available() else 1
    taken: dict[int, list[float]] = {bound: [] for bound in options.staleness}
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        prompts = save_model(
            options.size, model, options.prompts * (1 + warm_up(options) * 2 + options.steps)
        )
        os.sched_setaffinity(0, cores[half : 2 * half])  # what is started has it too
        with start(model, options) as server:
            os.sched_setaffinity(0, cores[:half])
            name = "sglang" if options.python else "embedded"
            inference = {"name": name, "url": server.url, "keep_cache": options.keep_cache}
            for pair, bound in itertools.product(range(options.pairs), options.staleness):
                output = Path(temporary) / f"{pair}-{bound}"
                train(model, prompts, output, bound, options, **inference)
                means = means_of(output, options)
                taken[bound].append(means["time/step"])
                shown = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
                print(f"max_staleness={bound}: {shown}", flush=True)
    first, *others = options.staleness
    for bound in others:
        print(f"steps per hour, {bound} over {first}: {spread(ratios(taken[first], taken[bound]))}")


if __name__ == "__main__":
    main()
