"""What the episode loop costs: episodes of three turns with two calls of a tool, against an engine that answers at once.

    python scripts/bench/episodes.py

All of a rollout runs but the model: rendering, exact token records, parsing and running the calls, rewards, trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.data.arithmetic import SYSTEM
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.quickstart.model import build_tokenizer

PARAMS = SamplingParams(max_tokens=64)
CALL = '<tool_call>{"name": "increment", "arguments": {"number": %d}}</tool_call>'
TURNS = (CALL % 1, CALL % 2, "The answer is 3.")
QUESTION = "Add one to 1, then one to the result. What is it?"


async def increment(number: int) -> int:
    """Add one.

    Args:
        number: to which one is added.
    """
    return number + 1


class SaysThree(BaseRewardFunction):
    """1 where the last message has the answer."""

    def __init__(self) -> None:
        super().__init__("says_three")

    def __call__(self, messages: Sequence[Any], ground_truth: Any, **kwargs: Any) -> float:
        return float(ground_truth in messages[-1].content)


class MockEngine(BaseClient):
    """Answers at once, each session's turns in their order."""

    context_length, vocab_size = 2048, 1 << 20

    def __init__(self, tokenizer: Any):
        self._turns: dict[str, int] = {}
        self._replies = []
        for text in TURNS:
            token_ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
            self._replies.append(Completion(text, token_ids, (-0.5,) * len(token_ids), "stop", 0))

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any, *, session: str = "") -> Completion:
        await asyncio.sleep(0)
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._replies[turn]

    async def release(self, session: str) -> None:
        self._turns.pop(session, None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    async def load(self, weight_ref: WeightRef) -> None:
        pass

    async def version(self) -> int:
        return 0


def tokenizer_of_the_task() -> Any:
    return build_tokenizer([SYSTEM, QUESTION, *TURNS] * 4, vocab_size=400)


def environment(tokenizer: Any, prompts: int, group_size: int) -> ToolMDPEnv:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    rows = [{"prompt_id": str(number), "messages": messages, "ground_truth": "3"} for number in range(prompts)]
    return ToolMDPEnv(rows, tokenizer, [SaysThree()], prompts, group_size, tools=[increment], describe_tools=False)


def play(client: BaseClient, tokenizer: Any, env: ToolMDPEnv, renderer: Renderer) -> dict[str, float]:
    """Play all prompts of the environment at once; wall and processor seconds, and what memory grew by at its peak."""
    process, peak = psutil.Process(), _reset_peak()
    with asyncio.Runner() as runner:
        rollout = Rollout(env, client, renderer, runner, seed=0)
        began, cpu = time.perf_counter(), time.process_time()
        result = rollout.play(range(len(env.dataset)), step=0, sampling_params=PARAMS)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        runner.run(client.disconnect())
    trajectories = result.trajectories
    assert len(trajectories) == len(env.dataset) * env.group_size
    assert all(trajectory.reward == 1.0 for trajectory in trajectories), "an episode did not end as it should"
    assert all(sum(span.author == "policy" for span in trajectory.spans) == 3 for trajectory in trajectories)
    grown = _peak(process) - peak
    return {"episodes": len(trajectories), "wall_s": wall, "cpu_s": cpu, "grown_bytes": grown}


def _reset_peak() -> int:
    """Forget the high-water mark of the resident set; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak(process: psutil.Process) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def alone(options: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, threads of tools included
    tokenizer = tokenizer_of_the_task()
    renderer = Renderer(tokenizer, roles=("tool",))
    for episodes, runs in ((1024, options.runs), (options.concurrent, 1)):
        env = environment(tokenizer, max(1, episodes // 8), 8)
        engine = MockEngine(tokenizer)
        play(engine, tokenizer, environment(tokenizer, 4, 8), renderer)  # warm
        results = [play(engine, tokenizer, env, renderer) for _ in range(runs)]
        rates = [result["episodes"] / result["wall_s"] for result in results]
        cpu = [result["episodes"] / result["cpu_s"] for result in results]
        grown = max(result["grown_bytes"] for result in results)
        print(
            f"{results[0]['episodes']:,} episodes at once, one core: {statistics.median(rates):,.0f} a second "
            f"({min(rates):,.0f} to {max(rates):,.0f}), by processor time {statistics.median(cpu):,.0f}; "
            f"peak above the idle process {grown / 2**20:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--concurrent", type=int, default=10_000, help="episodes at once, of which memory is measured")
    alone(parser.parse_args())


if __name__ == "__main__":
    main()
