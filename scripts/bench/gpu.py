"""Check and measure rl4llm on a GPU in ten minutes, without a download and without a server.

    python scripts/bench/gpu.py all --out DIR                   # every check, in the order below
    python scripts/bench/gpu.py engine numbers --out DIR        # some of them
    python scripts/bench/gpu.py all --tiny                      # on a CPU: does every check still run?

Each check is a process with a time limit. One that hangs, dies or fails leaves a line, and the next one starts. A finding is
a JSON line with `check` and `what`, printed and appended to DIR/gpu.jsonl. DIR/CHECK.log has what a check and its commands
printed. Models have random weights in the shapes of Qwen2.5.

Is everything right?

    machine     versions, and what the card can do: bf16 products, copies, launches
    varlen      torch's attention in one call: the sizes that take it, its difference from plain attention
    engine      log-probs of the engine against those of the trainer on each path and with an adapter, also after a step
    numbers     log-probs and gradients in each dtype against float32 on the CPU; deterministic mode, twice
    train       `rl4llm train`: deterministic, twice, resumed, autocast, bf16, LoRA, PPO
    learn       the curve of the quickstart, as far as its time goes
    memory      the memory that `rl4llm plan` counts beside that of the allocator; offload and onload
    nccl        a group of one rank over NCCL: all_reduce, and log-probs and gradients under FSDP2
    images      the recipe `colours` with a frozen and a training image tower, in float32 and under autocast
    stream      asynchronous steps with a server of the embedded engine on the same GPU, also with the cache kept
    deepspeed   ZeRO 1, 2, 3 and 2 with offload_optimizer on one rank: a step; from ZeRO 2 on offload, onload, another step

How fast is it? These run one at a time:

    decode      tokens/s of the engine's paths and of `generate`, with rows of equal and unequal lengths
    update      tokens/s and TFLOP/s of an update, with checkpointing, with LoRA, and with attention block by block
    step        one GRPO step, and one of TRL where it is installed
    head        log-probs of 8,192 tokens with tiles of 8 MiB to 1 GiB
    publish     versions of a 1.5B model, to memory and to the disk

With --tiny the numbers only prove that the checks call the library correctly. The exit code is 3 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CORRECT = {  # seconds that a check may take on a GPU
    "machine": 50, "varlen": 60, "engine": 160, "numbers": 110, "train": 200, "learn": 180, "memory": 90,
    "nccl": 70, "images": 160, "stream": 160, "deepspeed": 100,
}  # fmt: skip
SPEED = {"decode": 100, "update": 140, "step": 200, "head": 30, "publish": 40}
CHECKS = CORRECT | SPEED
ALONE = {"machine", *SPEED}
SLOWER = 4  # times, with --tiny
FILE = "gpu.jsonl"
FAILED = 3  # the exit code when a check failed


def write(out: Path, check: str, what: str, **facts: Any) -> None:
    """Print one finding, and append it to the file."""
    short = {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in facts.items()}
    line = json.dumps({"check": check, "what": what, **short}, default=str)
    print(line, flush=True)
    with (out / FILE).open("a") as file:
        file.write(line + "\n")


class Driver:
    """Runs checks in the order given, each in a process: several at a time, except those that have to be alone."""

    def __init__(self, names: list[str], out: Path, *, tiny: bool, seconds: float, at_once: int):
        self._names, self._out, self._tiny, self._at_once = names, out, tiny, at_once
        self._end = time.monotonic() + seconds
        self._started: list[subprocess.Popen[bytes]] = []
        self._left_out: list[str] = []
        self._stopped = False

    def command(self, name: str) -> list[str]:
        words = [sys.executable, __file__, name, "--here", "--out", str(self._out)]
        return [*words, "--tiny"] if self._tiny else words

    def run(self) -> bool:
        """Run all checks, leave no process, and return whether every check passed."""
        begun, failed = time.monotonic(), []
        for _, group in itertools.groupby(self._names, lambda name: name if name in ALONE else ""):
            names = list(group)
            with ThreadPoolExecutor(self._at_once) as pool:
                failed += [
                    name
                    for name, passed in zip(names, pool.map(self._passes, names), strict=True)
                    if not passed
                ]
        if self._left_out:
            write(self._out, "all", "left out", error="no time was left", checks=self._left_out)
        write(self._out, "all", "end", seconds=time.monotonic() - begun, failed=failed)
        return not failed

    def stop(self) -> None:
        """End the checks that run; no other one begins."""
        self._stopped = True
        for process in list(self._started):
            _kill(process)

    def _passes(self, name: str) -> bool:
        """Run a check, report how it ended, and end what it started."""
        begun = time.monotonic()
        if self._stopped or begun > self._end:
            self._left_out.append(name)
            return False
        environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with (self._out / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(self.command(name), stderr=log, env=environ, start_new_session=True)
        self._started.append(process)
        if self._stopped:
            _kill(process)
        try:
            limit = CHECKS[name] * (SLOWER if self._tiny else 1)
            code = process.wait(min(limit, max(0.0, self._end - begun)))
            what = "done" if code in (0, FAILED) else "died"
        except subprocess.TimeoutExpired:
            code, what = None, "timeout"
        _kill(process)
        self._started.remove(process)
        error = {} if what == "done" else {"error": f"exit code {code}; see {name}.log"}
        write(self._out, name, what, seconds=time.monotonic() - begun, **error)
        return code == 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def here(names: list[str], out: Path, *, tiny: bool) -> bool:
    """Run checks in this process, without limits, and return whether all passed."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import gpu_checks
    import gpu_runs
    import gpu_speed
    from gpu_probe import Probe

    passed = True
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        for name in names:
            probe = Probe(name, out, Path(work), tiny=tiny, limit=CHECKS[name] * (SLOWER if tiny else 1))
            homes = [home for home in (gpu_checks, gpu_runs, gpu_speed) if hasattr(home, name)]
            probe.run(getattr(homes[0], name), write)
            passed = passed and not probe.failed
    return passed


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("checks", nargs="*", metavar="CHECK", help="all, or some of the above")
    options.add_argument("--tiny", action="store_true", help="small models; the only choice without a GPU")
    options.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a new directory)")
    options.add_argument("--seconds", type=float, default=600, help="limit of all checks (default: 600)")
    options.add_argument("--here", action="store_true", help="run in this process, without limits")
    given = options.parse_args()
    names = list(CHECKS) if "all" in given.checks else given.checks
    if not names or not CHECKS.keys() >= set(names):
        options.error(f"CHECK={' '.join(names)!r} is unknown. Known: all, {', '.join(CHECKS)}.")
    if not given.tiny:
        import torch

        if not torch.cuda.is_available():
            options.error("torch sees no GPU. Use --tiny to run on a CPU.")
    out = given.out or Path(tempfile.mkdtemp(prefix="rl4llm_gpu_findings_"))
    out.mkdir(parents=True, exist_ok=True)
    if given.here:
        return 0 if here(names, out, tiny=given.tiny) else FAILED
    driver = Driver(names, out, tiny=given.tiny, seconds=given.seconds, at_once=1 if given.tiny else 5)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: driver.stop())
    return 0 if driver.run() else FAILED


if __name__ == "__main__":
    sys.exit(main())
