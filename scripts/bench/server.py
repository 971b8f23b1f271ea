"""How much of a real SGLang server's speed a rollout uses: tokens/s of whole rollouts against a plain load generator.

    python scripts/bench/server.py --python ../sglang/bin/python

16 prompts of 64 tokens x 8 samples x 64 new tokens of forced length. The rollout is the trainer's own: prompts rendered,
episodes played, replies checked, rewards computed. The load generator posts the same prompts with the same parameters, all
at once, and reads the replies. They take turns on one server, which runs on the CPU; its prefix cache is flushed in between.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import transformers
from models import PROMPTS
from peer import in_turns, parser_of, ratios, spread
from step import NEW_TOKENS, STEPS, save_model, sglang_of, trainer_of

from rl4llm.trainers.rl import RLTrainer


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
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="of the environment that SGLang is installed in")
    parser.add_argument("--size", default="1m")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        prompts = save_model(options.size, directory / "model", PROMPTS * STEPS)
        with sglang_of(directory / "model", options.python) as server:
            inference = {"name": "sglang", "url": server.url}
            keys = {"inference": inference, "data.shuffle": False}
            with trainer_of(directory, prompts, {}, **keys).trainer as trainer:
                trainer.resume()
                trainer.publish()
                pairs = in_turns({"": lambda: pair(trainer, server.url)}, options.pairs)[""]
    ours, theirs = zip(*pairs, strict=True)
    for name, values in (("rollout", ours), ("load generator", theirs)):
        print(f"{name:15} median {statistics.median(values):8,.0f} tokens/s")
    print(f"share of the server's speed: {spread(ratios(ours, theirs))}")


def pair(trainer: RLTrainer, url: str) -> tuple[float, float]:
    """Tokens per second of a rollout, and of the load generator with its prompts."""
    asyncio.run(flush(url))
    ours, prompts = rollout(trainer)
    asyncio.run(flush(url))
    return ours, asyncio.run(load(url, prompts))


if __name__ == "__main__":
    main()
