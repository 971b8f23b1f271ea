"""Two servers: behind the real router of SGLang, and on their own, where one is killed in mid-rollout and returns.

They serve the embedded engine, which starts in a fraction of the time of SGLang.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPException
from urllib.error import URLError

import psutil
import pytest
from ended_runs import TwoTurns, metrics
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.runtime.ports import free_port

BOOT_S = 240
STEPS, PROMPTS, GROUP, TURNS = 4, 12, 2, 2


class Started:
    """A server that a launcher keeps alive."""

    def __init__(self, model_dir, directory):
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self._said = directory / f"{self.port}.log", directory / f"{self.port}.said"
        words = [
            "rl4llm", "serve", "--engine", "embedded", "--cpu", "--restarts", "1", "--port", self.port, "--log",
            self.log, model_dir, "model.autocast=none",
        ]  # fmt: skip
        with open(self._said, "wb") as said:
            command = [sys.executable, "-m", *map(str, words)]
            self.launcher = subprocess.Popen(command, stderr=said, start_new_session=True)

    def said(self):
        return self._said.read_text()

    def wait_until_ready(self):
        deadline = time.monotonic() + BOOT_S
        while "is ready at" not in self.said():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def kill(self):
        supervisor = psutil.Process(self.launcher.pid).children()[0]
        os.kill(supervisor.children()[0].pid, signal.SIGKILL)

    def stop(self):
        self.launcher.terminate()
        self.launcher.wait()

    def answers(self):
        """Return how many requests for tokens it answered since it started, the canary's among them."""
        return self._shown("/server_info", "answers")

    def version(self):
        """Return the version that it reports; None if it cannot be reached."""
        return self._shown("/model_info", "weight_version")

    def _shown(self, path, name):
        try:
            return json.load(urllib.request.urlopen(f"{self.url}{path}", timeout=5))[name]
        except (OSError, URLError, HTTPException):
            return None


@pytest.fixture(scope="module")
def servers(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(Started(model_dir, directory))
            stack.callback(started[-1].stop)
        for server in started:
            server.wait_until_ready()
        yield started


def trainer(model_dir, directory, env=TwoTurns, steps=STEPS, **inference):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(PROMPTS)
    ]
    return GRPOTrainer(
        str(model_dir),
        rows,
        [Vowels()],
        env=env,
        output={"dir": str(directory)},
        inference={"name": "embedded", **inference},
        rollout={"prompts": PROMPTS, "group_size": GROUP, "max_tokens": 6},
        training={"lr": 3e-3},
        mismatch={"stop_above": 1e-4},
        max_steps=steps,
        **{"env.max_steps": TURNS, "model.autocast": "none"},  # the servers compute in float32
    )


@pytest.mark.sglang
@pytest.mark.usefixtures("sglang_python")
def test_a_run_through_the_router_uses_both_servers(servers, model_dir, tmp_path):
    from rl4llm.extensions.servers.launch import launch

    steps, urls = 2, [server.url for server in servers]
    before = [server.answers() for server in servers]
    flags = ["--worker-urls", *urls, "--port", "0"]
    with launch("sglang-router", flags, cpu=True, log=tmp_path / "router.log") as router:
        until_it_has(router, 2)
        trainer(model_dir, tmp_path / "run", steps=steps, url=urls, router=router.url).train()
    rows = metrics(tmp_path / "run")
    assert [row["trajectories"] for row in rows] == [PROMPTS * GROUP] * steps
    assert rows[-1]["fleet/attempts"] == steps * PROMPTS * GROUP * TURNS
    assert rows[-1]["fleet/failures"] == rows[-1]["fleet/left"] == 0
    # it takes turns, and the canary has each server score two sequences at the start and after each step
    each = steps * PROMPTS * GROUP * TURNS // 2 + 2 * (1 + steps)
    sampled = 2  # the canary's tokens, by the first server
    answers = [server.answers() - count for server, count in zip(servers, before, strict=True)]
    assert answers == [each + sampled, each]
    assert [server.version() for server in servers] == [str(steps)] * 2


def until_it_has(router, workers):
    """Wait until the router has found its servers, which it does after it reports that it is healthy."""
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(URLError):
            if json.load(urllib.request.urlopen(f"{router.url}/readiness"))["healthy_workers"] == workers:
                return
        assert time.monotonic() < deadline, router.last_words()
        time.sleep(0.1)


def test_a_server_killed_in_mid_rollout_loses_no_sample(servers, model_dir, tmp_path):
    killed, returned, answers = [], [], []

    class Kills(TwoTurns):
        async def respond(self, sample):
            step, fleet = int(sample.session.split("/")[0]), run.trainer.inference.client
            if step == 1 and not killed:
                home = fleet._homes.of[sample.session]
                killed.extend(server for server in servers if server.url == str(home))
                killed[0].kill()
            while step == 2 and len(fleet.engines()) < 2:
                await asyncio.sleep(0.2)
            if step == 2 and not returned:
                returned.append(killed[0].version())
            if step == 3 and not answers:
                answers.append(killed[0].answers())
            return super().respond(sample)

    run = trainer(model_dir, tmp_path, Kills, url=[server.url for server in servers])
    run.train()
    assert "died, exit code 137" in killed[0].said()
    assert "in 1 s: restart 1 of 1" in killed[0].said()
    assert returned == ["2"]
    steps = metrics(tmp_path)
    assert [(step["trajectories"], step["failures"]) for step in steps] == [(PROMPTS * GROUP, 0)] * STEPS
    last = steps[-1]
    assert last["fleet/failures"] > 0
    assert last["fleet/moved"] > 0
    assert (last["fleet/left"], last["fleet/came_back"], last["fleet/servers"]) == (1, 1, 2)
    assert killed[0].answers() > answers[0] + 2  # it answers again, not the canary alone
    assert [server.version() for server in servers] == [str(STEPS)] * 2


def test_stopped_servers_leave_no_process(servers):
    families = [psutil.Process(server.launcher.pid).children(recursive=True) for server in servers]
    for server in servers:
        server.launcher.terminate()
    assert [server.launcher.wait(30) for server in servers] == [143, 143]
    assert all(len(family) >= 2 for family in families)
    assert not any(process.is_running() for family in families for process in family)
