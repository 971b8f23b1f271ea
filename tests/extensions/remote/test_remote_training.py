"""Training on environments in other processes: a real host, which is killed and started again in the middle of a step."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from forked_python import started
from hosting import HostThread
from safetensors.torch import load
from torch.testing import assert_close

from rl4llm.cli import main

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "remote_dapo.yaml"
SMALL = [
    "rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "tracking.tensorboard=false", "checkpoint.every=0", "eval.every=0", "env.describe_tools=false", "algorithm.name=grpo",
    "training.lr=1e-3", "deterministic=true",
    "rewards=[repetition, {name: length, unit: chars, max_length: 1, margin: 40}]",
]  # fmt: skip
DEBATE = {
    "config": ROOT / "configs" / "debate_grpo.yaml",
    "small": [
        *(item for item in SMALL if "tools" not in item),
        "env.instructions={pro: Answer., con: Object.}",
        "rewards=[{name: hosted_envs:MoreLetters}, {name: winner, by: {name: length, max_length: 20, unit: chars}}]",
    ],
}


class Host:
    """`rl4llm serve env`, in a process."""

    def __init__(self, program):
        self.process, self._err = program.process, program.err
        while not self._err.read_text().endswith("\n"):
            assert self.process.is_alive()
            time.sleep(0.01)
        self.address = self.said[0].partition(" at ")[2].partition(",")[0].strip(" .\n")
        self.port = int(self.address.rpartition(":")[2])

    @property
    def said(self):
        return self._err.read_text().splitlines()

    def end(self):
        """End it as a user does; nothing of it stays."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.join(20)
        assert self.process.exitcode == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive


@pytest.fixture
def start():
    """Return start(names, port=0): the host of these environments."""
    with ExitStack() as programs:
        words = ("-m", "rl4llm", "serve", "env", "--env")
        yield lambda names, port=0: Host(programs.enter_context(started(*words, names, "--port", port)))


def train(model_dir, directory, *overrides, config=CONFIG, small=SMALL):
    place = [f"model.path={model_dir}", f"output.dir={directory}"]
    assert main(["train", str(config), *place, *small, *overrides]) == 0
    return (directory / "model" / "model.safetensors").read_bytes()


def test_host_killed_and_restarted_changes_no_result(model_dir, tmp_path, capfd, start):
    mortal = [
        "env.name=hosted_envs:Mortal", "env.tools=[calculator]", "env.max_steps=3", f"env.died={tmp_path / 'died'}",
    ]  # fmt: skip
    (tmp_path / "died").touch()
    here = train(model_dir, tmp_path / "here", *mortal, "env.remote=null")
    (tmp_path / "died").unlink()
    first, hosts = start("hosted_envs:Mortal"), []

    def start_again():
        first.process.join()
        hosts.append(start("hosted_envs:Mortal", first.port))

    watch = threading.Thread(target=start_again, daemon=True)
    watch.start()
    there = train(model_dir, tmp_path / "there", *mortal, f"env.remote={first.address}", "env.dies_at=30")
    watch.join(60)
    assert (tmp_path / "died").exists()
    assert_close(load(there), load(here))
    said = " ".join(capfd.readouterr().out.split())
    lost = f"Host of environments {first.address} leaves the pool of 1: env host {first.address}, while "
    lost += r".*; its \d episodes are played again"
    assert re.search(lost, said)
    rows = [json.loads(line) for line in (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()]
    assert [row["trajectories"] for row in rows if "trajectories" in row] == [8.0, 8.0]
    hosts[0].end()
    assert [line.partition(";")[0] for line in hosts[0].said[1:3]] == [
        "hosted_envs:Mortal: opened by a trainer",
        "hosted_envs:Mortal: its trainer disconnected after 8 episodes",
    ]


def test_hosted_debate_has_the_opponents_of_its_configuration(model_dir, tmp_path):
    options = ["max_steps=1", "env.opponents={con: 'hosted_envs:rival'}"]
    here = train(model_dir, tmp_path / "here", *options, **DEBATE)
    with HostThread(["debate"]) as host:
        remote = f"env.remote={host.address}"
        assert train(model_dir, tmp_path / "there", *options, remote, **DEBATE) == here
        assert train(model_dir, tmp_path / "alone", "max_steps=1", remote, **DEBATE) != here
        assert any("debate: opened by a trainer" in line for line in host.said)


@contextmanager
def words_of_children(pid):
    """Collect the words of the commands of a process's children until the end: they may end with what they were for."""
    shown, ended = set(), threading.Event()

    def look():
        while not ended.wait(0.05):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    shown.update(process.cmdline())

    with ThreadPoolExecutor() as pool:
        looked = pool.submit(look)
        try:
            yield shown
        finally:
            ended.set()
        looked.result()


def test_a_token_stays_out_of_what_is_shown(model_dir, tmp_path, capfd, monkeypatch, start):
    monkeypatch.setenv("RL4LLM_ENV_TOKEN", "open sesame vqxwzk")
    host = start("tool")
    rewards = (
        "rewards=[math, {name: length, unit: chars, max_length: 1, margin: 40}]"  # `math` starts processes
    )
    with words_of_children(host.process.pid) as shown:
        train(model_dir, tmp_path / "run", f"env.remote={host.address}", "max_steps=1", rewards)
    assert "for trainers with the same token" in host.said[0]
    assert shown and "vqxwzk" not in " ".join(shown)
    host.end()
    told = capfd.readouterr()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if b"vqxwzk" in path.read_bytes()]
    assert "vqxwzk" not in "".join([*host.said, told.out, told.err])


@pytest.mark.parametrize("arguments", [
    ["--host", "0.0.0.0"], ["training.lr=1"], ["--tls-cert", "cert.pem"], ["--port", "{taken}"],
])  # fmt: skip
def test_a_host_that_must_not_be_started_is_refused(arguments, monkeypatch):
    monkeypatch.delenv("RL4LLM_ENV_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [argument.format(taken=taken.getsockname()[1]) for argument in arguments]
        assert main(["serve", "env", "--env", "tool", *filled]) in (1, 2)
