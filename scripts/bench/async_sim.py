"""What `rollout.max_staleness` would give on other hardware: the source of groups, with a clock and servers simulated.

    python scripts/bench/async_sim.py --update-s 8 --servers 1 16 --median 300 --sigma 1.0    # lengths are log-normal
    python scripts/bench/async_sim.py --run runs/turns        # lengths and times of a run with rollout.max_staleness=0

`GroupStream` starts the groups and hands them over, as in training. A server decodes a token for all its rows in --base-s
plus --row-s for each row. An episode goes to the server with the fewest rows and stays there. The trainer takes --update-s
for a step. While it trains and a server decodes, both take --shared times as long, as cores that share their memory do. A
publish stops the servers for --publish-s, and then for --prefill-s for each token of their rows, --prompt-tokens of each
included (0 with a kept cache). It prints seconds per step, and the shares of their time that trainer and servers wait.

With --run, the steps that count (after --warm-up, up to --steps) give the times, and episodes have the lengths of those of
the run. --shared is how much longer the updates of the same steps took in the run of --beside, whose server was busy too,
and --publish-busy-s how long its publishes took:

    python scripts/bench/staleness.py --staleness 0 1 4 --steps 5 --pairs 1 --output RUNS
    python scripts/bench/async_sim.py --run RUNS/0-0 --beside RUNS/0-4 --steps 10 --warm-up 5 --staleness 0 1 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import selectors
import statistics
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
from peer import parser_of

from rl4llm.data.prompts import PromptStream
from rl4llm.envs.stream import GroupStream
from rl4llm.tracking.tracker import read_jsonl

SLICES = 50  # of an update, in each of which a server decodes or not


class Clock(selectors.SelectSelector):
    """A selector that jumps to the next timer, so that waiting takes no time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class Simulation:
    """Runs coroutines by a simulated clock, only while the trainer waits for one; takes the place of a `Runner`."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._loop = asyncio.SelectorEventLoop(self._clock)
        self._loop.time = lambda: self._clock.now  # type: ignore[method-assign]
        self.outcome: Any = None

    @property
    def now(self) -> float:
        return self._clock.now

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Simulation:
        self.outcome = self._loop.create_task(coroutine)
        return self

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self.run(asyncio.wait(tasks))
        self._loop.close()

    def wait(self, outcomes: Sequence[Future[Any]]) -> None:
        for outcome in outcomes:
            self.run(asyncio.wait_for(asyncio.wrap_future(outcome, loop=self._loop), None))


class Server:
    """Decodes a token for all of its rows at a time, and computes them again after a publish."""

    def __init__(self, options: argparse.Namespace):
        self.base_s, self.row_s, self.prefill_s = options.base_s, options.row_s, options.prefill_s
        self.prompt_tokens = options.prompt_tokens
        self.rows: dict[
            asyncio.Future[None], list[float]
        ] = {}  # the tokens that each has, and those that are missing
        self.paused = self._again = False
        self.busy_s, self._shared = 0.0, 1.0
        self._changed = asyncio.Event()

    async def decode(self, tokens: int) -> None:
        row: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rows[row] = [0, tokens]
        self._changed.set()
        await row

    def pause(self, paused: bool) -> None:
        self.paused, self._again = paused, True
        self._changed.set()

    def share(self, factor: float) -> bool:
        """Take `factor` times as long for a token from now on; return whether any row is decoded."""
        if factor != self._shared:
            self._shared = factor
            self._changed.set()
        return bool(self.rows) and not self.paused

    async def serve(self) -> None:
        """Decode for ever; between two changes of the rows all of them advance at the same speed."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            if self.paused or not self.rows:
                await self._changed.wait()
                continue
            began = loop.time()
            if self._again:
                self._again = False
                tokens = sum(done + self.prompt_tokens for done, _ in self.rows.values() if done)
                await asyncio.sleep(self.prefill_s * tokens)
                self.busy_s += loop.time() - began
                continue
            token_s = (self.base_s + self.row_s * len(self.rows)) * self._shared
            with suppress(TimeoutError):
                async with asyncio.timeout(min(missing for _, missing in self.rows.values()) * token_s):
                    await self._changed.wait()
            self.busy_s += loop.time() - began
            decoded = (loop.time() - began) / token_s
            for row, (done, missing) in list(self.rows.items()):
                self.rows[row] = [done + decoded, missing - decoded]
                if missing - decoded < 1e-6:
                    del self.rows[row]
                    row.set_result(None)


class Group:
    """The episodes of a prompt, as `GroupStream` plays them."""

    def __init__(self, rollout: Fleet, lengths: Sequence[int]):
        self.rollout, self.lengths = rollout, lengths
        self.outcome: Future[None] = Future()

    async def announce(self) -> None:
        """Do nothing; no server waits for others."""

    async def play(self) -> None:
        await asyncio.gather(*map(self.rollout.generate, self.lengths))
        self.outcome.set_result(None)


class Fleet:
    """Plays groups on servers; takes the place of a `Rollout`."""

    plays_whole = False

    def __init__(self, servers: Sequence[Server], group_size: int, length: Callable[[], int]):
        self.servers, self.group_size, self._length = servers, group_size, length

    def begin(self, rows: Sequence[int], **how: Any) -> list[Group]:
        return [Group(self, [self._length() for _ in range(self.group_size)]) for _ in rows]

    async def generate(self, tokens: int) -> None:
        await min(self.servers, key=lambda server: len(server.rows)).decode(tokens)


def train(clock: Simulation, servers: Sequence[Server], options: argparse.Namespace) -> None:
    """Take the time of an update, and slow down the servers meanwhile."""
    for _ in range(SLICES):
        busy = [server.share(options.shared) for server in servers]
        clock.run(asyncio.sleep(options.update_s / SLICES * (options.shared if any(busy) else 1.0)))
    for server in servers:
        server.share(1.0)


def simulate(
    options: argparse.Namespace, servers: int, bound: int, length: Callable[[], int]
) -> tuple[float, ...]:
    """Return the seconds of a step, and the shares of the time that the trainer and the servers wait."""
    clock = Simulation()
    fleet = Fleet([Server(options) for _ in range(servers)], options.samples, length)
    stream = GroupStream(fleet, PromptStream(1 << 20, options.prompts), clock, dict)  # type: ignore[arg-type]
    for server in fleet.servers:
        clock.start(server.serve())
    waited, busy_s, began_s = 0.0, 0.0, 0.0
    for step in range(options.steps):
        if step == options.warm_up:  # then episodes could begin early
            waited, began_s, busy_s = 0.0, clock.now, sum(server.busy_s for server in fleet.servers)
        while stream.left < options.prompts * (bound + 1):
            stream.admit(options.prompts)
        asked = clock.now
        stream.take(options.prompts)
        waited += clock.now - asked
        train(clock, fleet.servers, options)
        for paused in (True, False):
            for server in fleet.servers:
                server.pause(paused)
            publish_s = options.publish_busy_s if bound else options.publish_s
            clock.run(asyncio.sleep(publish_s * paused))
    total = clock.now - began_s
    clock.close()
    busy = (sum(server.busy_s for server in fleet.servers) - busy_s) / servers
    return total / (options.steps - options.warm_up), waited / total, 1 - busy / total


Lengths = Callable[[], Callable[[], int]]
"""Returns what draws the tokens of episodes, the same ones for each simulation."""


def log_normal(options: argparse.Namespace) -> Lengths:
    """Return draws of lengths."""

    def begin() -> Callable[[], int]:
        draw, middle = random.Random(0), math.log(options.median)
        return lambda: max(1, min(options.most, round(draw.lognormvariate(middle, options.sigma))))

    return begin


def of_run(directory: Path, options: argparse.Namespace) -> Lengths:
    """Set the times to those of a run with rollout.max_staleness=0; return its lengths, over and over in their order.

    A rollout takes --base-s for each token of its longest episode, and --row-s for each token of a server. Least squares
    over the steps give both.
    """
    rows = [row for row in read_jsonl(directory / "metrics.jsonl") if "time/rollout" in row]
    steps = [
        [
            sum(len(span["token_ids"]) for span in episode["spans"] if span["author"] == "policy")
            for episode in read_jsonl(directory / "episodes" / f"step-{row['step']:06}.jsonl")
        ]
        for row in rows
    ]
    options.prompt_tokens = statistics.fmean(row["prompt_length/mean"] for row in rows)
    counted, servers = slice(options.warm_up, options.steps), options.servers[0]
    took = [row["time/rollout"] for row in rows[counted]]
    causes = [[max(step) for step in steps[counted]], [sum(step) / servers for step in steps[counted]]]
    options.base_s, options.row_s = fit(causes, took)
    options.publish_s = options.publish_busy_s = publishing(rows[counted])
    options.update_s = statistics.fmean(row["time/step"] - row["time/rollout"] for row in rows[counted])
    options.update_s -= options.publish_s
    if options.beside:
        busy = [row for row in read_jsonl(options.beside / "metrics.jsonl") if "time/update" in row]
        options.shared, options.publish_busy_s = slowdown(rows[counted], busy), publishing(busy[counted])
    print(
        f"fitted to rollouts of {statistics.fmean(took):.2f} s: --base-s={options.base_s:.3g} --row-s={options.row_s:.3g} "
        f"--update-s={options.update_s:.3g} --publish-s={options.publish_s:.3g} "
        f"--publish-busy-s={options.publish_busy_s:.3g} --shared={options.shared:.3g}"
    )
    lengths = [length for step in steps for length in step]
    return lambda: itertools.cycle(lengths).__next__


def publishing(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean seconds from the end of an update until episodes go on."""
    return statistics.fmean(row.get("time/publish", 0.0) + row.get("time/verify", 0.0) for row in rows)


def slowdown(alone: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]]) -> float:
    """Return how many times as long the updates of the same steps took in another run, at least 1."""
    both = {row["step"]: row["time/update"] for row in beside}
    pairs = [(row["time/update"], both[row["step"]]) for row in alone if row["step"] in both]
    return max(1.0, sum(other for _, other in pairs) / sum(own for own, _ in pairs))


def fit(causes: Sequence[Sequence[float]], took: Sequence[float]) -> list[float]:
    """Return the factors of the causes, none below 0, whose sums of products come nearest to `took`."""
    table, sums = numpy.array(causes).T, numpy.array(took)
    used = list(range(len(causes)))
    while True:
        factors = numpy.linalg.lstsq(table[:, used], sums, rcond=None)[0]
        if factors.min() >= 0:
            return [
                float(factors[used.index(cause)]) if cause in used else 0.0 for cause in range(len(causes))
            ]
        del used[int(factors.argmin())]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--median", type=float, default=300.0, help="tokens of an episode")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the tokens")
    parser.add_argument("--most", type=int, default=8192, help="tokens of an episode")
    parser.add_argument("--base-s", type=float, default=0.01)
    parser.add_argument("--row-s", type=float, default=0.0001)
    parser.add_argument(
        "--prefill-s", type=float, default=0.0, help="a token, computed again after a publish"
    )
    parser.add_argument("--prompt-tokens", type=float, default=0.0, help="of an episode")
    parser.add_argument("--update-s", type=float, default=8.0)
    parser.add_argument("--shared", type=float, default=1.0, help="1 where trainer and servers share nothing")
    parser.add_argument("--publish-s", type=float, default=0.5)
    parser.add_argument("--publish-busy-s", type=float, help="with a bound above 0 (default: as --publish-s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--run", type=Path, help="a run with rollout.max_staleness=0")
    parser.add_argument(
        "--beside", type=Path, help="the same with a greater one, to measure what busy servers cost"
    )
    options = parser.parse_args()
    if options.publish_busy_s is None:
        options.publish_busy_s = options.publish_s
    return options


def main() -> None:
    options = parse()
    lengths = of_run(options.run, options) if options.run else log_normal(options)
    for servers in options.servers:
        first = None
        for bound in options.staleness:
            step_s, waits, idle = simulate(options, servers, bound, lengths())
            first = first or step_s
            print(
                f"{servers} servers, max_staleness={bound}: {step_s:.2f} s a step, {first / step_s:.2f} times; "
                f"trainer waits {waits:.0%}, servers wait {idle:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
