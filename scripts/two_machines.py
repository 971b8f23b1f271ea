"""Two machines, a server more, a server less: what scripts/two_machines.sh runs, once an environment is there.

Every process is started as an engine of `rl4llm launch` would start it, by `--as ROLE` and the hosts of all roles.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"trainer": (0, 1), "server": (0, 1, 1), "router": (0,), "env": (1,)}  # on which machine each is
ADDRESSES = ("10.78.0.1", "10.78.0.2")
ADDED, REMOVED = 2, 1  # numbers of servers
BOOT_S, STEP_S, CHANGE_S = 900.0, 900.0, 120.0


class Machines:
    """Two network namespaces with a cable between them, and the processes in them."""

    def __init__(self) -> None:
        self.names = [f"rl4llm-{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self) -> Machines:
        cables = [f"rm{os.getpid()}-{number}" for number in range(2)]
        for name in self.names:
            self._ip("netns", "add", name)
            hosts = Path(f"/etc/netns/{name}/hosts")  # else each look for a name would wait for a server of names
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        first, second = self.names
        self._ip("link", "add", cables[0], "netns", first, "type", "veth", "peer", "name", cables[1], "netns", second)
        for name, cable, address in zip(self.names, cables, ADDRESSES, strict=True):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            for link in ("lo", cable):
                self._ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in map(int, found.split()):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def start(self, number: int, words: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            command = ["ip", "netns", "exec", self.names[number], *words]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environ})

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


class Run:
    """The processes of the run, and what their logs say."""

    def __init__(self, machines: Machines, directory: Path, config: list[str]):
        self.machines, self.directory, self.config = machines, directory, config
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        hosts = {f"RL4LLM_{role.upper()}_HOSTS": ",".join(ADDRESSES[at] for at in where) for role, where in PLACES.items()}
        keys = {"RL4LLM_SERVER_KEY": secrets.token_hex(16), "RL4LLM_ENV_TOKEN": secrets.token_hex(16)}
        self.environ = {**hosts, **keys, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start(self, role: str, number: int) -> None:
        words = [sys.executable, "-m", "rl4llm", "launch", *self.config, "--as", role]
        own = {**self.environ, "RL4LLM_NUMBER": str(number)}
        self.processes[role, number] = self.machines.start(PLACES[role][number], words, self.log(role, number), own)

    def stop(self, role: str, number: int) -> None:
        self.processes[role, number].terminate()

    def log(self, role: str, number: int) -> Path:
        return self.directory / f"{role}-{number}.log"

    def says(self, role: str, number: int) -> str:
        return " ".join(self.log(role, number).read_text(errors="replace").split())

    def steps(self) -> list[dict[str, float]]:
        file = self.directory / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if "reward/mean" in row]  # others are of evaluations

    def wait(self, what: str, reached: Callable[[], bool], within_s: float) -> float:
        """Seconds until it is so; ends the script when that takes too long, or a process that trains ends badly."""
        begin = time.monotonic()
        while not reached():
            codes = [self.processes[role].poll() for role in self.processes if role[0] == "trainer"]
            if time.monotonic() - begin > within_s or any(codes):
                sys.exit(
                    f"Not {what} after {time.monotonic() - begin:.0f} s (trainers: {codes}); see {self.directory}/*.log"
                )
            time.sleep(0.05)
        return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    _check(arguments)
    directory = arguments.dir.resolve()
    directory.mkdir(parents=True)
    config = [str(ROOT / "configs" / "quickstart.yaml"), f"model.path={arguments.model.resolve()}"]
    config += [f"output.dir={directory / 'run'}", "inference.name=sglang", "rollout.prompts=8", "model.device=cpu"]
    config += ["launch.nodes=2", "launch.servers=3", "launch.server_gpus=0", "launch.router=true", "launch.env_hosts=1"]
    config += ["max_steps=30", "checkpoint.every=10", *arguments.overrides]
    with Machines() as machines, ExitStack() as ends:
        run = Run(machines, directory, config)
        ends.callback(lambda: [process.terminate() for process in run.processes.values()])
        _train(run)


def _train(run: Run) -> None:
    for number in (0, REMOVED):
        run.start("server", number)
    for number in (0, REMOVED):
        run.wait(f"ready: server {number}", lambda number=number: "is ready at" in run.says("server", number), BOOT_S)
    for role, number in (("env", 0), ("router", 0), ("trainer", 0), ("trainer", 1)):
        run.start(role, number)
    run.wait("at step 5", lambda: len(run.steps()) >= 5, STEP_S * 5)
    run.start("server", ADDED)
    run.wait("ready: the added server", lambda: "is ready at" in run.says("server", ADDED), BOOT_S)
    _print("added", run, f"{_url(ADDED)} is back in the pool")
    before = _answers(run, ADDED)
    used_s = run.wait("used: the added server", lambda: _answers(run, ADDED) > before + 4, STEP_S)
    print(f"  it answered requests {used_s:.1f} s later", flush=True)
    step = len(run.steps())
    run.wait("three steps on", lambda: len(run.steps()) >= step + 3, STEP_S * 3)
    run.stop("server", REMOVED)
    _print("removed", run, f"{_url(REMOVED)} leaves the pool")
    trainers = [run.processes["trainer", number] for number in range(2)]
    run.wait("at the end", lambda: all(process.poll() == 0 for process in trainers), STEP_S * 100)
    _rewards(run)


def _print(what: str, run: Run, line: str) -> None:
    """How soon each of the two trainers notices."""
    begin = time.monotonic()
    for number in range(2):
        run.wait(f"{what} for trainer {number}", lambda number=number: line in run.says("trainer", number), CHANGE_S)
        print(f"a server is {what}: trainer {number} says so after {time.monotonic() - begin:.1f} s", flush=True)


def _url(number: int) -> str:
    return f"http://{ADDRESSES[PLACES['server'][number]]}:{30000 + number}"


def _answers(run: Run, number: int) -> int:
    found = re.search(r"its log is (\S+)", run.says("server", number))
    return Path(found[1]).read_text(errors="replace").count('"POST /generate HTTP/1.1" 200')


def _rewards(run: Run) -> None:
    steps = run.steps()
    rewards = [step["reward/mean"] for step in steps]
    mean = [sum(part) / len(part) for part in (rewards[:5], rewards[-5:])]
    lost = sum(step["failures"] for step in steps)
    first, last = mean
    print(f"{len(steps)} steps, {lost:g} episodes lost; reward {first:.2f} in the first five, {last:.2f} in the last five")
    for line in (run.directory / "run" / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"step {row['step']}: held-out success {row['accuracy']:.3f}")
    if mean[1] <= mean[0]:
        sys.exit("The reward did not rise.")


def _check(arguments: argparse.Namespace) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        sys.exit("Making network namespaces takes root and iproute2 (`ip`).")
    if not os.environ.get("RL4LLM_SGLANG_PYTHON"):
        sys.exit(
            "RL4LLM_SGLANG_PYTHON does not name the Python of SGLang's environment; scripts/install_sglang_cpu.sh makes one."
        )
    if not arguments.model.is_dir():
        sys.exit(f"There is no model in {arguments.model}. scripts/quickstart.sh makes one, as runs/quickstart/warm.")
    if arguments.dir.exists():
        sys.exit(f"{arguments.dir} exists. Remove it, or set DIR.")


if __name__ == "__main__":
    main()
