"""What the episode loop costs: episodes of three turns with two calls of a tool, against an engine that answers at once.

    python scripts/bench/episodes.py
    python scripts/bench/episodes.py --peer-python ../verifiers/bin/python

All of a rollout runs but the model: rendering, exact token records, parsing and running the calls, rewards, trajectories.
Without a peer the engine is in this process, and the process has one core. With one, both sides play the same tasks through
HTTP against the same mock server, in alternation; README.md says how.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from episodes_server import serve, texts
from episodes_task import SYSTEM, TURNS, increment, plain_tool, question, scored
from peer import Memory, Peer, in_turns, parser_of, ratios, spread

from rl4llm.backends.tiny import build_tokenizer
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.runtime.cpu import set_aside_what_stays
from rl4llm.runtime.runner import Runner

HERE = Path(__file__).parent
GROUP, AT_ONCE = 8, 1024
PARAMS = SamplingParams(max_tokens=64)
LIMITS = {"vocab_size": 4096, "context_length": 2048}


class SaysTheSum(BaseRewardFunction):
    """1 where the last message has the answer."""

    def __init__(self) -> None:
        super().__init__("says_the_sum")

    def __call__(self, messages: Sequence[Any], ground_truth: Any, **kwargs: Any) -> float:
        return scored(messages[-1].content, ground_truth)


class MockEngine(BaseClient):
    """Answers at once, each session's turns in order. If `alike`, the samples of a prompt give equal answers,
    else each calls the tool with different numbers.
    """

    context_length, vocab_size = LIMITS["context_length"], LIMITS["vocab_size"]

    def __init__(self, tokenizer: Any, prompts: int, alike: bool = True):
        self._turns: dict[str, int] = {}
        self._replies = {
            f"{number}/{index}": [
                _completion(tokenizer, text)
                for text in said(number, number if alike else number * GROUP + index)
            ]
            for number in range(prompts)
            for index in range(GROUP)
        }

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, *, session: str = ""
    ) -> Completion:
        await asyncio.sleep(0)
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._replies[session.partition("/")[2]][turn]

    async def release(self, session: str) -> None:
        self._turns.pop(session, None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    async def load(self, weight_ref: WeightRef) -> None:
        pass

    async def version(self) -> int:
        return 0


def said(number: int, first: int) -> list[str]:
    """What the model says to a question: calls from the number `first` on, and the answer."""
    return [*texts(first)[:-1], texts(number)[-1]]


def _completion(tokenizer: Any, text: str) -> Completion:
    token_ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    return Completion(text, token_ids, (-0.5,) * len(token_ids), "stop", 0)


def tokenizer_of_the_task() -> Any:
    return build_tokenizer([SYSTEM, question(123), *texts(123)] * 4, vocab_size=400)


def environment(tokenizer: Any, episodes: int, tool: Callable[..., Any] = increment) -> ToolMDPEnv:
    """Return episodes of different prompts, in groups that share one."""
    rows = [row(number) for number in range(max(1, episodes // GROUP))]
    return ToolMDPEnv(rows, tokenizer, [SaysTheSum()], len(rows), min(GROUP, episodes), tools=[tool])


def row(number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(number)}]
    return {"prompt_id": str(number), "messages": messages, "ground_truth": number}


def play(client: BaseClient, env: ToolMDPEnv) -> dict[str, float]:
    """Play all prompts of the environment at once; wall and processor seconds, and what memory grew by at its peak."""
    renderer = Renderer(env.tokenizer, env.tool_schemas, roles=("tool",))
    memory = Memory()
    with Runner() as runner:
        rollout = Rollout(env, client, renderer, runner, seed=0)
        began, cpu = time.perf_counter(), time.process_time()
        result = rollout.play(range(len(env.dataset)), step=0, sampling_params=PARAMS)
        seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        runner.run(client.disconnect())
    trajectories = result.trajectories
    assert len(trajectories) == len(env.dataset) * env.group_size
    assert all(trajectory.reward == 1.0 for trajectory in trajectories), "an episode did not end as it should"
    assert all(trajectory.num_turns == TURNS for trajectory in trajectories)
    return {"episodes": len(trajectories), **memory.report(), **seconds}


def alone(options: argparse.Namespace) -> None:
    """Episodes a second on one core, the engine in this process, and the memory of many at once."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokenizer = tokenizer_of_the_task()
    kinds = [
        ("async tool", AT_ONCE, options.runs, increment, True),
        ("async tool, no results alike", AT_ONCE, options.runs, increment, False),
        ("plain tool", AT_ONCE, options.runs, plain_tool(), True),
        ("async tool", options.concurrent, 1, increment, True),
    ]
    for kind, episodes, runs, tool, alike in kinds:
        env = environment(tokenizer, episodes, tool)
        engine = MockEngine(tokenizer, len(env.dataset), alike)
        play(engine, environment(tokenizer, 32, tool))  # warm
        set_aside_what_stays()  # as `rl4llm train` does before its first step
        results = [play(engine, env) for _ in range(runs)]
        grown = max(result["growth_gb"] for result in results)
        what = f"{episodes:,} episodes at once, {kind}, one core"
        print(f"{what}: {rates(results)}; peak above the idle process {grown * 1e3:.0f} MB")


def rates(results: Sequence[dict[str, float]]) -> str:
    """Episodes a second, by the wall and by the processor."""
    wall, cpu = ([result["episodes"] / result[clock] for result in results] for clock in ("wall_s", "cpu_s"))
    return f"a second {spread(wall, ',.0f')}, by processor time {spread(cpu, ',.0f')}"


def peer_of(options: argparse.Namespace, url: str, directory: str) -> Peer:
    """Return the other side's process."""
    prompts = max(1, options.episodes // GROUP)
    job = {"url": url, "prompts": prompts, "group_size": GROUP, "interception": options.peer_interception}
    command = [options.peer_python, str(HERE / "verifiers_peer.py"), json.dumps(job)]
    environment = {**os.environ, "HOME": directory}  # where it makes a directory for each rollout
    environment.pop("PYTHONPATH", None)
    return Peer("the peer", command, environment, Path(directory, "peer.log"))


class Server:
    """The mock model's process, which both sides ask."""

    def __enter__(self) -> str:
        ours, its = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")  # spares it the imports; there are no threads yet
        self._process = fork.Process(target=lambda: serve(tokenizer_of_the_task(), its.send), daemon=True)
        self._process.start()
        return f"http://127.0.0.1:{ours.recv()}"

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()


def side_by_side(options: argparse.Namespace) -> None:
    """The same tasks played by both sides, in alternation."""
    with ExitStack() as stack:
        url = stack.enter_context(Server())
        tokenizer = tokenizer_of_the_task()
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        peer = stack.enter_context(peer_of(options, url, directory))
        env = environment(tokenizer, options.episodes)
        client = SGLangClient(url, tokenizer, **LIMITS)
        name = " ".join(f"{name} {version}" for name, version in peer.versions.items())
        sides = {"rl4llm": lambda: play(client, env), name: peer.ask}
        taken = in_turns(sides, options.pairs, options.warm_up)
    print(f"{options.episodes} episodes of {TURNS} turns at once, {options.pairs} pairs")
    for which, results in taken.items():
        print(f"{which}: {rates(results)}")
    for clock, what in (("wall_s", "wall clock"), ("cpu_s", "processor time")):
        theirs, ours = ([result[clock] for result in taken[which]] for which in (name, "rl4llm"))
        print(f"ratio by {what}: {spread(ratios(theirs, ours))}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--concurrent", type=int, default=10_000, help="simultaneous episodes whose memory is measured"
    )
    parser.add_argument(
        "--peer-python", help="the Python of an environment with verifiers; then both sides are compared"
    )
    parser.add_argument(
        "--peer-interception", choices=["elastic", "server"], default="elastic", help="its proxies"
    )
    parser.add_argument("--episodes", type=int, default=256, help="at once, where both sides are compared")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="pairs before the first that counts")
    options = parser.parse_args()
    if options.peer_python:
        side_by_side(options)
    else:
        alone(options)


if __name__ == "__main__":
    main()
