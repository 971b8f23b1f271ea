"""What a workspace costs, with 1, 16 and 200 open at once, and what is left of a trainer that was killed.

    python scripts/bench/workspaces.py

Each workspace is opened and runs `true` a few times, with the image of the machine. The times to open, and from a start to
the result, are medians and 99th percentiles. Then the trainer is killed with -9 while all of them run programs that left
their session too: the number of processes, mounts and directories that are left after it, and the seconds until then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from peer import parser_of

from rl4llm.extensions.workspaces import Workspaces

MEMORY_BYTES = 64 << 20
LEFT_S = 60.0


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 16, 200])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for count in arguments.counts:
        if arguments.hold:
            asyncio.run(_measured(count, arguments.runs))
        else:
            _killed(count, arguments.runs)


async def _measured(count: int, runs: int) -> None:
    """Print the times of workspaces that are open at once, start a program in each, and wait to be killed."""
    pool = Workspaces(count=count, memory_bytes=MEMORY_BYTES)
    await (await pool.open()).close()  # the keeper runs, and the cache has the image
    opened, ran = [], []

    async def one() -> None:
        began = time.perf_counter()
        workspace = await pool.open()
        opened.append(time.perf_counter() - began)
        for _ in range(runs):
            began = time.perf_counter()
            assert (await workspace.run(["true"], wall_s=600)).code == 0
            ran.append(time.perf_counter() - began)
        program = await workspace.start(["sh", "-c", "setsid sleep 1000 & echo; sleep 1000"])
        await program.stdout.readline()
        workspaces.append((workspace, program))

    workspaces: list[object] = []
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - began
    print(
        f"{count} at once: open {_shown(opened)}; run {_shown(ran)}; {count * (runs + 1) / seconds:.0f} starts/s",
        flush=True,
    )
    print(pool._keeper.base if pool._keeper else "", flush=True)
    await asyncio.sleep(1000)


def _killed(count: int, runs: int) -> None:
    """Kill a process that measures, and print what is left."""
    command = [sys.executable, __file__, "--hold", "--counts", str(count), "--runs", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        print(trainer.stdout.readline().strip())
        base = trainer.stdout.readline().strip()
        members = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal.SIGKILL)
    began = time.perf_counter()
    while any(left := _left(members, base)) and time.perf_counter() - began < LEFT_S:
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    parts = ", ".join(
        f"{number} {what}" for number, what in zip(left, ("processes", "mounts", "directories"), strict=True)
    )
    print(f"  killed with {len(members)} processes: {parts} are left after {seconds:.1f} s")


def _left(members: list[psutil.Process], base: str) -> tuple[int, int, int]:
    running = [one for one in members if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    mounts = Path("/proc/mounts").read_text().count(base)
    return len(running), mounts, int(os.path.exists(base))


def _shown(seconds: list[float]) -> str:
    centiles = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    return f"median {statistics.median(seconds) * 1e3:.0f} ms, p99 {centiles[98] * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
