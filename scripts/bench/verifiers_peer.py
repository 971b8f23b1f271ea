"""verifiers' side of `episodes.py`: its single-agent environment with the harness of `verifiers_env.py`.

Runs in a separate environment (verifiers, aiohttp); started by `episodes.py`, not by hand.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import sys
import time
from typing import Any

import aiohttp
import verifiers.v1 as vf
from peer import Channel
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from verifiers_env import InProcessHarness


def environment(job: dict[str, Any]) -> vf.Env:
    """The tasks in its single-agent environment; its lightest runtime only makes a directory for each rollout."""
    agent = {"harness": {"id": "verifiers_env"}, "runtime": {"type": "subprocess"}}
    taskset = {"id": "verifiers_env", "prompts": job["prompts"]}
    return load_environment(resolve_env_config({"taskset": taskset, "agent": agent}))


async def play(env: vf.Env, context: ModelContext, group_size: int) -> dict[str, float]:
    """All episodes at once: rollouts, token counts, rewards; nothing is written to disk."""
    began, cpu = time.perf_counter(), time.process_time()
    slots = [slot for task in env.taskset for slot in env.slots(task, group_size)]
    episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    for episode in episodes:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        assert episode.ok and not errors, f"an episode failed: {errors[:1]}"
        assert all(trace.reward == 1.0 and trace.num_turns == 3 for trace in episode.traces), (
            "not as it should end"
        )
    return {"episodes": len(episodes), **seconds}


async def serve(channel: Channel, job: dict[str, Any]) -> None:
    env = environment(job)
    context = ModelContext(
        model="mock", client=EvalClientConfig(base_url=job["url"] + "/v1", api_key_var="NO_KEY")
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with env.serving(), aiohttp.ClientSession(connector=connector) as session:
        InProcessHarness.http = session
        channel.send(ready=True, versions={"verifiers": importlib.metadata.version("verifiers")})
        while await asyncio.to_thread(channel.wait):
            channel.send(**await play(env, context, job["group_size"]))


def main() -> None:
    logging.disable(logging.WARNING)
    channel = Channel()
    asyncio.run(serve(channel, json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
