"""What `rollout.max_staleness` gains, by the clock: 0 takes turns, above 0 episodes begin while earlier steps train.

    python scripts/bench/staleness.py [--staleness 0 1 4] [--median-tokens 200 --new-tokens 2000] [--tool-s 1.0]

A server of the embedded engine (or, with `--python`, a real SGLang on the CPU) and the trainer have a core each, as they
would have separate devices; a GPU they share. The bounds take turns, each in a separate run. The same `--steps` steps of
each run count, after as many that episodes begin as early as they can, and before the last ones, during which no further
episodes begin.

With `--median-tokens`, lengths are log-normal (sigma 1, 20 to `--new-tokens`). With `--tool-s`, the environment answers the
first turn after a log-normal time with that median in seconds (sigma 1, at most 60 times the median), and a second turn
follows. Lengths and times depend on the episode alone, so that all runs have the same ones.

With `--keep-cache`, unfinished answers continue with the cache of older weights after an update. What that makes of their
log-probs is in the mismatch.

At the end it prints the ratios of steps per hour, and a limit of each bound: that ratio if each rollout and the rest of
each step took as long as by turns, and a rollout began `bound` steps early. It also prints how much longer updates took
than by turns: trainer and server share the memory of the machine. The runs remain in `--output`. `async_sim.py --run
OUTPUT/0-0` knows that a server with more rows is slower, which gives a lower limit.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from models import PROMPTS, SHAPES, on_gpu
from peer import parser_of, ratios, spread
from step import save_model, sglang_of, trainer_of

from rl4llm.core.base_env import LLM, BaseMDPEnv, ChatMessage, SampleState
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.launch import ServerProcess, launch
from rl4llm.tracking.tracker import read_jsonl

SHORTEST = 20  # tokens of a log-normal answer
Taken = Sequence[Sequence[dict[str, float]]]  # the metrics of the steps that count of each run with one bound
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


def train(
    directory: Path, prompts: list[str], output: Path, bound: int, options: argparse.Namespace, **keys: Any
) -> None:
    """Train with rollouts of the benchmark's shape."""
    shape = {"prompts": options.prompts, "max_tokens": options.new_tokens, "max_staleness": bound}
    keys |= {"training.epochs": options.epochs, "env.max_steps": 2 if options.tool_s else 1}
    keys |= {"model.autocast": "auto" if on_gpu() else "none", "output.dir": str(output)}
    steps = warm_up(options) + options.steps + bound
    trainer_of(directory, prompts, shape, threads=1, env=Task, max_steps=steps, **keys).train()


def measured(output: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the metrics of the steps of a run that count."""
    rows = [row for row in read_jsonl(output / "metrics.jsonl") if "time/step" in row]
    return rows[warm_up(options) :][: options.steps]


def means_of(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means of what `MEANS` names, over the steps that measured it."""
    found = {name: [step[name] for step in steps if name in step] for name in MEANS}
    return {name: statistics.fmean(values) for name, values in found.items() if values}


def start(model: Path, options: argparse.Namespace) -> ServerProcess:
    """Return the server, not started yet."""
    if options.python is None and on_gpu():
        return launch("embedded", [str(model), "--port", "0", "model.autocast=auto"])
    if options.python is None:
        return launch("embedded", [str(model), "--port", "0", "threads=1", "model.autocast=none"], cpu=True)
    return sglang_of(model, options.python)


def compared(first: int, bound: int, taken: Mapping[int, Taken]) -> str:
    """Return the ratio of steps per hour, its limit if the first runs take turns, and that of the times of updates."""
    runs = zip(taken[first], taken[bound], strict=True)
    pairs = [(means_of(one), means_of(other)) for one, other in runs]
    faster = ratios(*([means["time/step"] for means in side] for side in zip(*pairs, strict=True)))
    said = f"{first} over {bound}: {spread(faster)}"
    if first == 0:
        limits = [least_s(run, 0) / least_s(run, bound) for run in taken[0]]
        said += f", limit {statistics.median(limits):.2f}"
    slower = statistics.median(other["time/update"] / one["time/update"] for one, other in pairs)
    return f"{said}; updates take {slower:.2f} times as long"


def least_s(steps: Sequence[dict[str, float]], bound: int) -> float:
    """Return the least mean seconds of steps whose rollouts begin `bound` steps early, if all took as long as by turns.

    Rollouts that began before the first of these steps may have ended before it.

    >>> [least_s([{"time/step": 30.0, "time/rollout": 20.0}] * 8, bound) for bound in (0, 1, 4)]
    [30.0, 15.0, 10.0]
    """
    ends = [0.0]
    for number, step in enumerate(steps):
        played = ends[number - bound] + step["time/rollout"] if number >= bound else 0.0
        ends.append(max(ends[number], played) + step["time/step"] - step["time/rollout"])
    return ends[-1] / len(steps)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--python", help="of the environment that SGLang is installed in")
    parser.add_argument("--size", choices=sorted(SHAPES), default="5m")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step, with 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1, help="training.epochs")
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
    half = len(cores) // 2 if on_gpu() else 1
    taken: dict[int, list[list[dict[str, float]]]] = {bound: [] for bound in options.staleness}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.output or Path(temporary)
        count = options.prompts * (2 + 2 * max(options.staleness) + options.steps)
        prompts = save_model(options.size, Path(temporary) / "model", count)
        os.sched_setaffinity(0, cores[half : 2 * half])  # what is started has it too
        with start(Path(temporary) / "model", options) as server:
            os.sched_setaffinity(0, cores[:half])
            name = "sglang" if options.python else "embedded"
            inference = {"name": name, "url": server.url, "keep_cache": options.keep_cache}
            for pair, bound in itertools.product(range(options.pairs), options.staleness):
                output = directory / f"{pair}-{bound}"
                train(Path(temporary), prompts, output, bound, options, inference=inference)
                taken[bound].append(measured(output, options))
                means = means_of(taken[bound][-1])
                told = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
                print(f"max_staleness={bound}: {told}", flush=True)
    for bound in options.staleness[1:]:
        print(compared(options.staleness[0], bound, taken))


if __name__ == "__main__":
    main()
