"""How much of a real SGLang server's speed a rollout uses: tokens/s of whole rollouts against a plain load generator.

    python scripts/bench/server.py --python ../sglang/bin/python

16 prompts of 64 tokens x 8 samples x 64 new tokens of forced length. The rollout is the trainer's own: prompts rendered,
episodes played, replies checked, rewards computed. The load generator posts the same prompts with the same parameters, all
at once, and reads the replies. They take turns on one server, which runs on the CPU; its prefix cache is flushed in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import transformers
from models import PROMPTS
from step import NEW_TOKENS, SAMPLES, STEPS, save_model, save_prompts

from rl4llm import GRPOTrainer
from rl4llm.extensions.servers.launch import launch
from rl4llm.trainers.rl import RLTrainer


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(completion) % 2) for completion in completions]


def build(directory: Path, url: str) -> RLTrainer:
    rows = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    options = {
        "inference": {"name": "sglang", "url": url},
        "rollout": {"prompts": PROMPTS, "group_size": SAMPLES, "max_tokens": NEW_TOKENS},
        "output.dir": str(directory / "run"),
        "data.shuffle": False,
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    return GRPOTrainer(str(directory / "model"), rows, [reward], **options).trainer


def rollout(trainer: RLTrainer) -> tuple[float, list[list[int]]]:
    """Tokens per second of one rollout, and the prompts it sent."""
    start = time.perf_counter()
    collected = trainer.collect()
    seconds = time.perf_counter() - start
    tokens = sum(trajectory.num_policy_tokens for trajectory in collected.trajectories)
    return tokens / seconds, [list(t.spans[0].token_ids) for t in collected.trajectories]


async def load(url: str, prompts: list[list[int]]) -> float:
    """Tokens per second of the plain load generator."""
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": params, "return_logprob": True} for prompt in prompts]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: dict[str, Any]) -> int:
            async with session.post(f"{url}/generate", json=body) as response:
                return len((await response.json())["output_ids"])

        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, bodies)))
        return tokens / (time.perf_counter() - start)


async def flush(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache"):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the environment that SGLang is installed in")
    parser.add_argument("--size", default="1m")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        prompts = save_model(options.size, directory / "model", PROMPTS * STEPS)
        save_prompts(prompts, directory / "prompts.jsonl")
        flags = ["--model-path", str(directory / "model"), "--port", "0", "--max-running-requests", "128"]
        with (
            launch("sglang", flags, python=options.python, cpu=True, log=directory / "log") as server,
            build(directory, server.url) as trainer,
        ):
            trainer.resume()
            trainer.publish()
            rollout(trainer)
            pairs = []
            for _ in range(options.pairs):
                asyncio.run(flush(server.url))
                ours, prompts = rollout(trainer)
                asyncio.run(flush(server.url))
                pairs.append((ours, asyncio.run(load(server.url, prompts))))
    for name, values in zip(("rollout", "load generator"), zip(*pairs, strict=True), strict=True):
        print(f"{name:15} median {statistics.median(values):8,.0f} tokens/s")
    ratios = [ours / theirs for ours, theirs in pairs]
    print(
        f"share of the server's speed: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
