"""Check and measure rl4llm on a GPU in ten minutes, without a download and without a server.

    python scripts/bench/gpu.py all --out DIR                   # every check, in the order below
    python scripts/bench/gpu.py engine numbers --out DIR        # some of them
    python scripts/bench/gpu.py all --tiny                      # on a CPU: does every check still run?
    python scripts/bench/gpu.py --table DIR                     # what DIR/gpu.jsonl holds, as a table in Markdown

Each check is a process with a time limit. One that hangs, dies or fails leaves a line, and the next one starts. A finding is
a JSON line with `check` and `what`, printed and appended to DIR/gpu.jsonl. DIR/CHECK.log has what a check and its commands
printed. Models have random weights in the shapes of Qwen2.5.

Is everything right?

    machine     versions, and what the card can do: bf16 products, copies, launches
    varlen      torch's attention in one call: the sizes that take it, its difference from plain attention
    engine      log-probs of the engine against those of the trainer on each path, before and after a step
    numbers     log-probs and gradients in each dtype against float32 on the CPU; deterministic mode, twice
    train       `rl4llm train`: deterministic, twice, resumed, autocast, bf16, LoRA, PPO
    learn       the curve of the quickstart, as far as its time goes
    lora        the same with an adapter, and the path that the engine takes
    memory      the memory that `rl4llm plan` counts beside that of the allocator; offload and onload
    ipc         handles of sync.name=tensor, opened by another process
    nccl        a group of one rank over NCCL: all_reduce, and log-probs and gradients under FSDP2
    images      the recipe `colours` with a frozen and a training image tower, in float32 and under autocast
    stream      asynchronous steps with a server of the embedded engine on the same GPU, also with the cache kept
    deepspeed   ZeRO 1, 2, 3 and 2 with offload_optimizer on one rank: a step; from ZeRO 2 on offload, onload, another step

How fast is it? These run one at a time:

    decode      tokens/s of the engine's paths and of `generate`, with rows of equal and unequal lengths
    update      tokens/s and TFLOP/s of an update, with checkpointing and with LoRA
    step        one GRPO step, and one of TRL where it is installed, with `generate` and continuous batching
    profile     the 20 kernels that take longest, of an update and of decoding
    attention   an update with answers in one call a layer, block by block, and with plans of cuDNN
    sampler     from logits to tokens
    head        log-probs of 8,192 tokens with tiles of 8 MiB to 1 GiB
    publish     versions of a 1.5B model, to memory and to the disk

With --tiny the numbers only prove that the checks call the library correctly. The exit code is 3 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CORRECT = {  # seconds that a check may take on a GPU
    "machine": 40, "varlen": 50, "engine": 120, "numbers": 100, "train": 190, "learn": 170, "lora": 60, "memory": 80,
    "ipc": 50, "nccl": 60, "images": 150, "stream": 150, "deepspeed": 90,
}  # fmt: skip
SPEED = {
    "decode": 90, "update": 100, "step": 240, "profile": 40, "attention": 40, "sampler": 20, "head": 20, "publish": 30,
}  # fmt: skip
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
    """Runs checks in the order given: several at a time, except those that have to be alone.

    Processes start early and wait for their turn, so that their imports take no time of the device. None starts while a
    check runs alone.
    """

    def __init__(self, names: list[str], out: Path, *, tiny: bool, seconds: float, at_once: int):
        self._waiting, self._out, self._tiny, self._at_once = list(names), out, tiny, at_once
        self._begun = time.monotonic()
        self._end = self._begun + seconds
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._running: dict[str, tuple[float, float]] = {}  # when each began, and its deadline
        self._failed: list[str] = []
        self.stopped = False  # a signal sets it, since an exception could lose a process that just starts

    def command(self, name: str) -> list[str]:
        """Return the command of a check, which waits for a line before it begins."""
        words = [sys.executable, __file__, name, "--here", "--wait", "--out", str(self._out)]
        return [*words, "--tiny"] if self._tiny else words

    def run(self) -> bool:
        """Run all checks, leave no process, and return whether every check passed."""
        with tempfile.TemporaryDirectory(prefix="rl4llm_gpu_", ignore_cleanup_errors=True) as work:
            self._work = Path(work)
            try:
                while (self._waiting or self._running) and not self.stopped:
                    self._collect()
                    self._prepare()
                    while self._may_begin():
                        self._begin(self._waiting.pop(0))
                    time.sleep(0.05)
            finally:
                for name in self._started:
                    self._kill(name)
        seconds = time.monotonic() - self._begun
        write(self._out, "all", "end", seconds=seconds, failed=self._failed)
        return not self._failed and not self.stopped

    def _collect(self) -> None:
        """Report checks that ended, and end those whose time is over."""
        for name, (begun, deadline) in list(self._running.items()):
            code, now = self._started[name].poll(), time.monotonic()
            if code is None and now < deadline:
                continue
            self._kill(name)
            what = "timeout" if code is None else "done" if code in (0, FAILED) else "died"
            error = {} if what == "done" else {"error": f"exit code {code}; see {name}.log"}
            write(self._out, name, what, seconds=now - begun, **error)
            self._failed += [name] if code != 0 else []
            del self._running[name], self._started[name]
        if self._waiting and time.monotonic() > self._end:
            write(self._out, "all", "left out", error="no time was left", checks=self._waiting)
            self._failed, self._waiting = self._failed + self._waiting, []

    def _prepare(self) -> None:
        """Start the processes of the next checks, and of all that will run alone one after the other."""
        if ALONE & self._running.keys():
            return
        alone = next((n for n, name in enumerate(self._waiting) if name not in ALONE), len(self._waiting))
        environ = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "GPU_WORK": str(self._work)}
        options: dict[str, Any] = {"env": os.environ | environ, "start_new_session": True}
        for name in self._waiting[: max(alone, self._at_once)]:
            if name not in self._started:
                with (self._out / f"{name}.log").open("ab") as log:
                    command, pipe = self.command(name), subprocess.PIPE
                    self._started[name] = subprocess.Popen(command, stdin=pipe, stderr=log, **options)

    def _may_begin(self) -> bool:
        if not self._waiting or self._waiting[0] not in self._started:
            return False
        if self._waiting[0] not in ALONE:
            return not ALONE & self._running.keys() and len(self._running) < self._at_once
        imported = ((self._work / f"{name}.ready").exists() for name in self._started)
        ended = (process.poll() is not None for process in self._started.values())
        return not self._running and all(map(max, imported, ended))

    def _begin(self, name: str) -> None:
        now, limit = time.monotonic(), CHECKS[name] * (SLOWER if self._tiny else 1)
        self._running[name] = now, min(now + limit, self._end)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._started[name].stdin.fileno(), b"begin\n")  # type: ignore[union-attr]

    def _kill(self, name: str) -> None:
        """End a check and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._started[name].pid, signal.SIGKILL)
        self._started[name].wait()


def here(names: list[str], out: Path, *, tiny: bool, wait: bool) -> bool:
    """Run checks in this process, without limits, and return whether all passed."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import gpu_checks
    import gpu_runs
    import gpu_speed
    from gpu_probe import Probe

    passed, work = True, os.environ.get("GPU_WORK")
    with contextlib.nullcontext(work) if work else tempfile.TemporaryDirectory() as directory:
        if wait:
            Path(directory, f"{names[0]}.ready").touch()
            sys.stdin.readline()
        for name in names:
            probe = Probe(name, out, Path(directory), tiny=tiny, limit=CHECKS[name] * (SLOWER if tiny else 1))
            homes = [home for home in (gpu_checks, gpu_runs, gpu_speed) if hasattr(home, name)]
            probe.run(getattr(homes[0], name), write)
            passed = passed and not probe.failed
    return passed


def table(out: Path) -> str:
    """Return the findings of the last time that each check ran, as a table in Markdown."""
    found: dict[str, list[str]] = {}
    for line in map(json.loads, (out / FILE).read_text().splitlines()):
        check, what = line.pop("check"), line.pop("what")
        if what == "begin":
            found.pop(check, None)
        if "error" in line or what not in ("begin", "end", "done"):
            facts = ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in line.items())
            found.setdefault(check, []).append(f"| {check} | {what} | {facts} |")
    rows = [row for name in (*CHECKS, "all") for row in found.get(name, [])]
    return "\n".join(["| check | what | found |", "|---|---|---|", *rows])


def _short(value: Any) -> str:
    text = " ".join((f"{value:,}" if isinstance(value, float) else str(value)).replace("|", "/").split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("checks", nargs="*", metavar="CHECK", help="all, or some of the above")
    options.add_argument("--tiny", action="store_true", help="small models; the only choice without a GPU")
    options.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a new directory)")
    options.add_argument("--seconds", type=float, default=600, help="limit of all checks (default: 600)")
    options.add_argument("--at-once", type=int, help="checks at a time (default: 5, with --tiny 1)")
    options.add_argument("--table", type=Path, metavar="DIR", help="print the findings of DIR as a table")
    options.add_argument("--here", action="store_true", help="run in this process, without limits")
    options.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.table:
        print(table(given.table))
        return 0
    names = list(CHECKS) if "all" in given.checks else given.checks
    if not names or not CHECKS.keys() >= set(names):
        options.error(f"CHECK={' '.join(names)!r} is unknown. Known: all, {', '.join(CHECKS)}.")
    if not given.tiny and not given.wait:
        import torch

        if not torch.cuda.is_available():
            options.error("torch sees no GPU. Use --tiny to run on a CPU.")
    out = given.out or Path(tempfile.mkdtemp(prefix="rl4llm_gpu_findings_"))
    out.mkdir(parents=True, exist_ok=True)
    if given.here:
        return 0 if here(names, out, tiny=given.tiny, wait=given.wait) else FAILED
    at_once = given.at_once or (1 if given.tiny else 5)
    driver = Driver(names, out, tiny=given.tiny, seconds=given.seconds, at_once=at_once)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(driver, "stopped", True))
    return 0 if driver.run() else FAILED


if __name__ == "__main__":
    sys.exit(main())
