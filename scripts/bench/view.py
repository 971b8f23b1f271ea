"""How soon `rl4llm view` shows a run of 100,000 episodes, and what finding one costs: seconds and processor seconds.

    python scripts/bench/view.py

The run is written first: 1,000 steps of 100 episodes, each two turns of 64 tokens with all that the trainer knew of them.
Then the command is started as a user starts it. Its files were just written, so they are in memory. Beside it, in the same
run, stands the plain way to list them: parsing every line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--dir", help="where the run is written (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        run = Path(directory) / "run"
        size = _write(run, arguments.episodes)
        print(f"{arguments.episodes:,} episodes, {size / 1e6:.0f} MB")
        _print("parsing every line", *_plain(run))
        with _server(run) as server:
            for what, seconds, cpu in _measured(server, arguments.episodes):
                _print(what, seconds, cpu)


class _server:
    """The command as a process."""

    def __init__(self, run: Path):
        self.run = run

    def __enter__(self) -> _server:
        self.started = time.perf_counter()
        command = [sys.executable, "-m", "rl4llm", "view", str(self.run), "--port", "0", "--no-token"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = re.search(r"http://\S+/", self.process.stderr.readline())[0]
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            return json.load(answer)

    def cpu(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def _measured(server: _server, episodes: int) -> Iterator[tuple[str, float, float]]:
    def since(start: float, before: float) -> tuple[float, float]:
        return time.perf_counter() - start, server.cpu() - before

    server.get("api/runs")
    yield "the command answers", *since(server.started, 0.0)
    rows = server.get("api/runs/0/episodes")["rows"]
    yield f"the first {len(rows):,} episodes are listed", *since(server.started, 0.0)
    count = len(rows)
    while count < episodes:
        count += len(server.get(f"api/runs/0/episodes?from={count}")["rows"])
    yield "all of them are", *since(server.started, 0.0)
    start, before = time.perf_counter(), server.cpu()
    server.get(f"api/runs/0/episodes/{episodes // 2}")
    yield "one episode", *since(start, before)
    for text in ("number 77777", "calculator"):
        start, before = time.perf_counter(), server.cpu()
        found = server.get(f"api/runs/0/search?q={quote(text)}")
        yield f"search: {text!r}, {len(found['numbers']):,} found", *since(start, before)


def _write(run: Path, episodes: int) -> int:
    (run / "episodes").mkdir(parents=True)
    (run / "config.yaml").write_text("max_steps: 1000\n")
    numbers = [round(-0.001 * i, 6) for i in range(64)]
    span = {"author": "policy", "token_ids": list(range(300, 364)), "logprobs": numbers, "version": 3}
    span |= {"trainer_logprobs": numbers, "advantages": numbers, "weight": 0.0001, "clipped": []}
    spans = [
        {"author": "context", "token_ids": list(range(100))},
        span,
        {"author": "context", "token_ids": [1, 2]},
        span,
    ]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    size, each = 0, 100
    for first in range(0, episodes, each):
        lines = []
        for number in range(first, min(episodes, first + each)):
            said = [
                ("user", f"This is number {number}. " + "What is it? " * 8),
                ("assistant", call),
                ("tool", "42"),
            ]
            row = {
                "step": first // each,
                "prompt_id": f"task-{number // 8}",
                "sample": number % 8,
                "reward": number % 3 / 2,
            }
            row |= {"rewards": {"math": 1.0}, "stop_reason": "done", "turns": 2, "tokens": 128, "credit": 0.1}
            row |= {"mismatch": 1e-5, "messages": [{"role": role, "content": text} for role, text in said]}
            lines.append(json.dumps(row | {"ground_truth": "42", "spans": spans, "extras": {}}) + "\n")
        path = run / "episodes" / f"step-{first // each:06d}.jsonl"
        size += path.write_text("".join(lines))
    return size


def _plain(run: Path) -> tuple[float, float]:
    start, before = time.perf_counter(), time.process_time()
    for path in (run / "episodes").iterdir():
        with open(path, "rb") as file:
            for line in file:
                json.loads(line)
    return time.perf_counter() - start, time.process_time() - before


def _print(what: str, seconds: float, cpu: float) -> None:
    print(f"{what:44} {seconds:7.2f} s {cpu:7.2f} s of a processor")


if __name__ == "__main__":
    main()
