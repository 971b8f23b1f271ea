"""What the episode loop costs: episodes of three turns with two calls of a tool, against a server that answers at once.

    python scripts/bench/episodes.py [--peer-python ../verifiers/bin/python]

All of a rollout runs but the model: rendering, exact token records, parsing and running the calls, rewards, trajectories.
Both sides play the same tasks through HTTP with the same mock server, in alternation; README.md says how. Without a peer
only ours plays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from episodes_server import SYSTEM, TURNS, increment, question, scored, serve, texts
from peer import Peer, in_turns, parser_of, ratios, spread

from rl4llm.backends.tiny import build_tokenizer
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.runtime.runner import Runner

HERE = Path(__file__).parent
GROUP = 8
PARAMS = SamplingParams(max_tokens=64)
LIMITS = {"vocab_size": 4096, "context_length": 2048}


class SaysTheSum(BaseRewardFunction):
    """1 where the last message has the answer."""

    def __init__(self) -> None:
        super().__init__("says_the_sum")

    def __call__(self, messages: Sequence[Any], ground_truth: Any, **kwargs: Any) -> float:
        return scored(messages[-1].content, ground_truth)


def tokenizer_of_the_task() -> Any:
    return build_tokenizer([SYSTEM, question(123), *texts(123)] * 4, vocab_size=400)


def environment(tokenizer: Any, episodes: int) -> ToolMDPEnv:
    """Return episodes of different prompts, in groups that share one."""
    rows = [row(number) for number in range(max(1, episodes // GROUP))]
    return ToolMDPEnv(rows, tokenizer, [SaysTheSum()], len(rows), GROUP, tools=[increment])


def row(number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(number)}]
    return {"prompt_id": str(number), "messages": messages, "ground_truth": number}


def play(client: BaseClient, env: ToolMDPEnv) -> dict[str, float]:
    """Play all prompts of the environment at once; return wall and processor seconds."""
    renderer = Renderer(env.tokenizer, env.tool_schemas, roles=("tool",))
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
    return {"episodes": len(trajectories), **seconds}


def rates(results: Sequence[dict[str, float]]) -> str:
    """Episodes a second, by the wall and by the processor."""
    wall, cpu = ([result["episodes"] / result[clock] for result in results] for clock in ("wall_s", "cpu_s"))
    return f"a second {spread(wall, ',.0f')}, by processor time {spread(cpu, ',.0f')}"


def peer_of(options: argparse.Namespace, url: str, directory: str) -> Peer:
    """Return the other side's process."""
    prompts = max(1, options.episodes // GROUP)
    job = {"url": url, "prompts": prompts, "group_size": GROUP}
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


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--peer-python", help="the Python of an environment with verifiers")
    parser.add_argument("--episodes", type=int, default=256, help="at once")
    parser.add_argument("--pairs", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    options = parse()
    with ExitStack() as stack:
        url = stack.enter_context(Server())
        tokenizer = tokenizer_of_the_task()
        env = environment(tokenizer, options.episodes)
        client = SGLangClient(url, tokenizer, **LIMITS)
        sides = {"rl4llm": lambda: play(client, env)}
        if options.peer_python:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            peer = stack.enter_context(peer_of(options, url, directory))
            sides[f"verifiers {peer.versions['verifiers']}"] = peer.ask
        taken = in_turns(sides, options.pairs)
    print(f"{options.episodes} episodes of {TURNS} turns at once, {options.pairs} pairs")
    ours = taken["rl4llm"]
    for name, results in taken.items():
        print(f"{name}: {rates(results)}")
        for clock in ("wall_s", "cpu_s") if name != "rl4llm" else ():
            pairs = ratios([result[clock] for result in results], [result[clock] for result in ours])
            print(f"{name} over rl4llm, {clock}: {spread(pairs)}")


if __name__ == "__main__":
    main()
