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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from rl4llm.runtime.supervise import supervised

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"trainer": (0, 1), "server": (0, 1, 1), "router": (0,), "env": (1,)}  # on which machine each is
ADDRESSES = ("10.78.0.1", "10.78.0.2")
SECOND = (1, 2)  # servers on the second machine: one of them runs, except while they change places
CANARY = 4  # requests of the two trainers by which a server proves its weights, at each publish
BOOT_S, STEP_S, CHANGE_S = 900.0, 900.0, 120.0
GRACE_S = 120.0


class Machines:
    """Two network namespaces with a cable between them, and the processes in them."""

    def __init__(self) -> None:
        self.names = [f"rl4llm-{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self) -> Machines:
        cables = [f"rm{os.getpid()}-{number}" for number in range(2)]
        for name in self.names:
            self._ip("netns", "add", name)
            # else each look for a name would wait for a server of names
            hosts = Path(f"/etc/netns/{name}/hosts")
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        first, second = self.names
        ends = f"{cables[0]} netns {first} type veth peer name {cables[1]} netns {second}"
        self._ip("link", "add", *ends.split())
        for name, cable, address in zip(self.names, cables, ADDRESSES, strict=True):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            for link in ("lo", cable):
                self._ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            found = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            ).stdout
            for pid in map(int, found.split()):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def start(
        self, number: int, words: list[str], log: Path, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            command = supervised(["ip", "netns", "exec", self.names[number], *words], GRACE_S)
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environ}
            )

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


class Run:
    """The processes of the run, and what their logs say."""

    def __init__(self, machines: Machines, directory: Path, config: list[str]):
        self.machines, self.directory, self.config = machines, directory, config
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        hosts = {
            f"RL4LLM_{role.upper()}_HOSTS": ",".join(ADDRESSES[at] for at in where)
            for role, where in PLACES.items()
        }
        keys = {"RL4LLM_SERVER_KEY": secrets.token_hex(16), "RL4LLM_ENV_TOKEN": secrets.token_hex(16)}
        self.environ = {**hosts, **keys, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start(self, role: str, number: int) -> None:
        words = [sys.executable, "-m", "rl4llm", "launch", *self.config, "--as", role]
        own = {**self.environ, "RL4LLM_NUMBER": str(number)}
        self.processes[role, number] = self.machines.start(
            PLACES[role][number], words, self.log(role, number), own
        )

    def stop(self, role: str, number: int) -> None:
        process = self.processes[role, number]
        process.terminate()
        process.wait()

    def log(self, role: str, number: int) -> Path:
        return self.directory / f"{role}-{number}.log"

    def says(self, role: str, number: int) -> str:
        return " ".join(self.log(role, number).read_text(errors="replace").split())

    def steps(self) -> list[dict[str, float]]:
        file = self.directory / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if "reward/mean" in row]  # others are of evaluations

    def ready(self, number: int) -> bool:
        return "is ready at" in self.says("server", number)

    def wait(self, what: str, reached: Callable[[], bool], within_s: float) -> float:
        """Seconds until it is so; ends the script when that takes too long, or a process that trains ends badly."""
        return self.watch({what: reached}, within_s)[what]

    def watch(self, reached: Mapping[str, Callable[[], bool]], within_s: float) -> dict[str, float]:
        """Seconds until each is so."""
        begin, found = time.monotonic(), {}
        while True:
            found |= {
                what: time.monotonic() - begin for what in reached if what not in found and reached[what]()
            }
            if len(found) == len(reached):
                return {what: found[what] for what in reached}
            codes = [self.processes[role].poll() for role in self.processes if role[0] == "trainer"]
            if time.monotonic() - begin > within_s or any(codes):
                late = ", ".join(what for what in reached if what not in found)
                seconds = time.monotonic() - begin
                sys.exit(f"Not {late} after {seconds:.0f} s (trainers: {codes}); see {self.directory}/*.log")
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument(
        "--times", type=int, default=1, help="servers added, and as many removed (default: %(default)s)"
    )
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    _check(arguments)
    directory = arguments.dir.resolve()
    directory.mkdir(parents=True)
    config = [str(ROOT / "configs" / "quickstart.yaml"), f"model.path={arguments.model.resolve()}"]
    config += [
        "launch={nodes: 2, servers: 3, server_gpus: 0, router: true, env_hosts: 1}",
        "rollout.prompts=8",
    ]
    config += [f"output.dir={directory / 'run'}", "inference.name=sglang", "model.device=cpu"]
    config += ["max_steps=30", "checkpoint.every=10", *arguments.overrides]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Machines() as machines, ExitStack() as ends:
        run = Run(machines, directory, config)
        ends.callback(lambda: [process.terminate() for process in run.processes.values()])
        _train(run, arguments.times)


def _train(run: Run, times: int) -> None:
    for number in (0, SECOND[0]):
        run.start("server", number)
    for number in (0, SECOND[0]):
        run.wait(f"ready: server {number}", lambda number=number: run.ready(number), BOOT_S)
    for role, number in (("env", 0), ("router", 0), ("trainer", 0), ("trainer", 1)):
        run.start(role, number)
    run.wait("at step 3", lambda: len(run.steps()) >= 3, STEP_S * 3)
    noticed: dict[str, list[float]] = {}
    for turn in range(times):
        _note(noticed, _added(run, SECOND[1 - turn % 2]))
        step = len(run.steps())
        run.wait("a step on", lambda step=step: len(run.steps()) > step, STEP_S)
        _note(noticed, _removed(run, SECOND[turn % 2]))
    trainers = [run.processes["trainer", number] for number in range(2)]
    run.wait("at the end", lambda: all(process.poll() == 0 for process in trainers), STEP_S * 100)
    for what, found in noticed.items():
        print(
            f"{what}: median {statistics.median(found):.1f} s, longest {max(found):.1f} s, of {len(found)}",
            flush=True,
        )
    _rewards(run)


def _added(run: Run, number: int) -> dict[str, float]:
    """How soon after a server is ready it is in the pool of each trainer, and has answered one."""
    line = f"{_url(number)} is back in the pool"
    before = [run.says("trainer", rank).count(line) for rank in range(2)]
    run.start("server", number)
    run.wait(f"ready: server {number}", lambda: run.ready(number), BOOT_S)
    answers = _answers(run, number)
    return run.watch(
        {
            **_in_both(run, "a server that is added is in the pool of", line, before),
            "a server that is added has answered": lambda: _answers(run, number) > answers + CANARY,
        },
        STEP_S,
    )


def _removed(run: Run, number: int) -> dict[str, float]:
    """Measure how soon a server that is asked to end leaves each trainer's pool."""
    line = f"{_url(number)} leaves the pool"
    before = [run.says("trainer", rank).count(line) for rank in range(2)]
    run.processes["server", number].terminate()
    found = run.watch(_in_both(run, "a server that is removed is out of the pool of", line, before), CHANGE_S)
    run.stop("server", number)
    return found


def _in_both(run: Run, what: str, line: str, before: list[int]) -> dict[str, Callable[[], bool]]:
    """Whether each trainer has said a line once more."""
    return {
        f"{what} trainer {rank}": lambda rank=rank, count=count: run.says("trainer", rank).count(line) > count
        for rank, count in enumerate(before)
    }


def _note(noticed: dict[str, list[float]], found: dict[str, float]) -> None:
    for what, seconds in found.items():
        noticed.setdefault(what, []).append(seconds)
        print(f"{what} after {seconds:.1f} s", flush=True)


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
    print(
        f"{len(steps)} steps, {lost:g} episodes lost; reward {first:.2f} in the first five, {last:.2f} in the last five"
    )
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
        sys.exit(
            f"{arguments.model} does not contain a model. scripts/quickstart.sh makes one, as runs/quickstart/warm."
        )
    if arguments.dir.exists():
        sys.exit(f"{arguments.dir} exists. Remove it, or set DIR.")


if __name__ == "__main__":
    main()
