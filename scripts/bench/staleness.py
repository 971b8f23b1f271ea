"""What `rollout.max_staleness` gains, by the clock: 0 takes turns, above 0 episodes begin while earlier steps train.

    python scripts/bench/staleness.py [--staleness 0 1 4] [--median-tokens 200 --new-tokens 2000] [--tool-s 1.0]

A server of the embedded engine (or, with `--python`, a real SGLang on the CPU) and the trainer have a core each, as they
would have separate devices. The bounds take turns, each in a separate run. The same `--steps` steps of each run count, after
as many that episodes begin as early as they can, and before the last ones, during which no further episodes begin.

With `--median-tokens`, lengths are log-normal (sigma 1, 20 to `--new-tokens`). With `--tool-s`, the environment answers the
first turn after a log-normal time with that median in seconds (sigma 1, at most 60 times the median), and a second turn
follows. Lengths and times depend on the episode alone, so that all runs have the same ones.

With `--keep-cache`, unfinished answers continue with the cache of older weights after an update. What that makes of their
log-probs is in the mismatch.

At the end it prints the ratios of steps per hour, and the limit of each bound. A step takes at least as long as what the
trainer does besides waiting for episodes; and an episode that begins `bound` steps early has `bound` + 1 steps to play and
to train, the longest one of a rollout too. It also prints how much longer updates took than where the server waits for
them: trainer and server share the memory of the machine. The runs remain in `--output`, and `async_sim.py --run OUTPUT/0-0
--beside OUTPUT/0-BOUND` predicts the others.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES
from step import SAMPLES, save_model
from verify import reward

from rl4llm import GRPOTrainer
from rl4llm.core.base_env import LLM, BaseMDPEnv, ChatMessage, SampleState
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.inspect.plan.staleness import Overlap
from rl4llm.extensions.servers.launch import ServerProcess, launch

SHORTEST = 20  # tokens of a log-normal answer
MEANS = ("time/rollout", "time/update", "time/publish", "time/verify", "mismatch/mean")


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


def train(model: Path, prompts: list[str], output: Path, options: argparse.Namespace, **keys: Any) -> None:
    """Train with rollouts of the benchmark's shape."""
    shape = {"prompts": options.prompts, "group_size": SAMPLES, "max_tokens": options.new_tokens}
    keys["rollout"] = shape | keys["rollout"]
    GRPOTrainer(
        str(model),
        [{"prompt": prompt, "ground_truth": ""} for prompt in prompts],
        [reward],
        threads=1,
        env=Task,
        max_steps=warm_up(options) + options.steps + keys["rollout"]["max_staleness"],
        **{
            "output.dir": str(output),
            "eval.every": 0,
            "checkpoint.every": 0,
            "env.max_steps": 2 if options.tool_s else 1,
            "model.autocast": "none",
            **keys,
        },
    ).train()


def measured(output: Path, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Return the mean seconds of the steps of a run that count, and the means of what `MEANS` names."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "time/step" in row][warm_up(options) :][: options.steps]
    means = {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in MEANS}
    return statistics.fmean(step["time/step"] for step in steps), means


def start(model: Path, options: argparse.Namespace) -> ServerProcess:
    """Return the server, not started yet."""
    if options.python is None:
        return launch("embedded", [str(model), "--port", "0", "threads=1", "model.autocast=none"], cpu=True)
    flags = ["--model-path", str(model), "--port", "0", "--max-running-requests", "128"]
    return launch("sglang", [*flags, "--max-total-tokens", "65536"], python=options.python, cpu=True)


Taken = Sequence[tuple[float, dict[str, float]]]
"""The seconds of a step, and the means, of each run with one bound."""


def compared(first: int, ones: Taken, bound: int, others: Taken) -> str:
    """Return the ratio of steps per hour, its limit if the first runs take turns, and that of the times of updates."""
    ratios = [one / other for (one, _), (other, _) in zip(ones, others, strict=True)]
    said = f"{first} over {bound}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    updates = [
        other["time/update"] / one["time/update"] for (_, one), (_, other) in zip(ones, others, strict=True)
    ]
    if first == 0:
        limits = [step_s / limit_s(step_s, means["time/rollout"], bound) for step_s, means in ones]
        said += f", limit {statistics.median(limits):.2f}"
    return f"{said}; an update takes {statistics.median(updates):.2f} times as long"


def limit_s(step_s: float, rollout_s: float, bound: int) -> float:
    """Return the least seconds of a step with a bound, from those of one that takes turns.

    >>> limit_s(30.0, 20.0, bound=1), limit_s(30.0, 20.0, bound=4)
    (15.0, 10.0)
    """
    return Overlap(rollout_s, step_s - rollout_s).step_s(bound, busy=0.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="of the environment that SGLang is installed in")
    parser.add_argument("--size", choices=sorted(SHAPES), default="5m")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step, with 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tool-s", type=float, default=0.0, help="median of the time that a tool takes")
    parser.add_argument("--median-tokens", type=int, default=0, help="median of the lengths of answers")
    parser.add_argument("--keep-cache", action="store_true", help="inference.keep_cache=true")
    parser.add_argument("--output", type=Path, help="where the runs are written (default: nowhere)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    Task.median_s, Task.median_tokens = options.tool_s, options.median_tokens
    transformers.utils.logging.disable_progress_bar()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Server and trainer need a core each, and there is one.")
    taken: dict[int, list[tuple[float, dict[str, float]]]] = {bound: [] for bound in options.staleness}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.output or Path(temporary)
        model = Path(temporary) / "model"
        prompts = save_model(
            options.size, model, options.prompts * (2 + 2 * max(options.staleness) + options.steps)
        )
        os.sched_setaffinity(0, cores[1:2])  # what is started has it too
        with start(model, options) as server:
            os.sched_setaffinity(0, cores[:1])
            inference = {
                "name": "sglang" if options.python else "embedded",
                "url": server.url,
                "keep_cache": options.keep_cache,
            }
            for pair in range(options.pairs):
                for bound in options.staleness:
                    output = directory / f"{pair}-{bound}"
                    train(
                        model, prompts, output, options, inference=inference, rollout={"max_staleness": bound}
                    )
                    mean, means = measured(output, options)
                    taken[bound].append((mean, means))
                    told = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
                    print(f"max_staleness={bound}: {mean:7.2f} s a step: {told}", flush=True)
    for bound in options.staleness[1:]:
        print(compared(options.staleness[0], taken[options.staleness[0]], bound, taken[bound]))


if __name__ == "__main__":
    main()
