"""What `rollout.max_staleness` gains, by the clock: 0 takes turns, above 0 episodes begin while earlier steps train.

    python scripts/bench/staleness.py --python ../sglang/bin/python [--staleness 0 1 4] [--tool-s 1.0]

16 prompts of 64 tokens x 8 samples of forced length through a real SGLang on the CPU. Server and trainer have a core each,
as they would have separate devices. The bounds take turns, each in a separate run. The first step of a run, whose episodes
could not begin early, does not count. With `--tool-s`, the environment answers the first turn after a log-normal time with
that median in seconds (sigma 1, at most 60 times the median), and a second turn follows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES
from step import SAMPLES, STEPS, save_model, save_prompts
from verify import reward

from rl4llm import GRPOTrainer
from rl4llm.core.base_env import LLM, BaseMDPEnv, ChatMessage, SampleState
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.launch import launch


class Task(BaseMDPEnv):
    """Length of the answer and time of the tool depend on the seed of the sample alone."""

    median_s = 0.0
    median_tokens = 0
    continue_truncated = True

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        if self.median_tokens:
            length = random.Random(sample.session).lognormvariate(math.log(self.median_tokens), 1.0)
            longest = sampling_params.max_tokens
            sampling_params = sampling_params.replace(max_tokens=min(max(20, round(length)), longest))
        await super()._run_episode(sample, llm, sampling_params)

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        if not self.median_s or sample.current_step > 1:
            return []
        seconds = random.Random(sample.session).lognormvariate(math.log(self.median_s), 1.0)
        await asyncio.sleep(min(seconds, 60 * self.median_s))
        return [ChatMessage("user", "Go on.")]


def seconds(
    directory: Path, name: str, options: argparse.Namespace, **keys: Any
) -> tuple[float, dict[str, float]]:
    """Return the mean of the steps of a run after its first, and the medians of their phases."""
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
            "env": Task,
            "env.max_steps": 2 if options.tool_s else 1,
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
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tool-s", type=float, default=0.0, help="median of the time that a tool takes")
    parser.add_argument("--median-tokens", type=int, default=0, help="median of the lengths of answers")
    return parser.parse_args()


def main() -> None:
    options = parse()
    Task.median_s, Task.median_tokens = options.tool_s, options.median_tokens
    transformers.utils.logging.disable_progress_bar()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Server and trainer need a core each, and there is one.")
    taken: dict[int, list[float]] = {bound: [] for bound in options.staleness}
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
            inference = {"name": "sglang", "url": server.url}
            for pair in range(options.pairs):
                for bound in options.staleness:
                    rollout = {"max_staleness": bound}
                    name = f"{pair}-{bound}"
                    mean, phases = seconds(directory, name, options, inference=inference, rollout=rollout)
                    taken[bound].append(mean)
                    told = ", ".join(
                        f"{phase.partition('/')[2]} {value:.2f}" for phase, value in phases.items()
                    )
                    print(f"max_staleness={bound}: {mean:7.2f} s a step: {told}", flush=True)
    first, *others = options.staleness
    for bound in others:
        ratios = [one / other for one, other in zip(taken[first], taken[bound], strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{first} over {bound}: {median:.2f} ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
