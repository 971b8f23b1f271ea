"""Several machines, as network namespaces with a cable between them: a killed process, and a cable that is pulled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from small_run import SmallRun

from rl4llm.compose import build_trainer
from rl4llm.config import load_config

RENDEZVOUS = "10.77.0.1:29500"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE_S = 240
SLOW = """
import time

def slow(completions, **columns):
    time.sleep(0.1)  # so that few steps last until the cable is pulled
    return [float(len(said) % 5) for said in completions]
"""


class Host:
    """A network namespace with one address, 10.77.0.(number + 1), and what runs in it."""

    def __init__(self, number):
        self.number, self.name = number, f"rl4llm-{os.getpid()}-{number}"
        self.cable = f"rl{os.getpid()}-{number}"
        self.address = f"10.77.0.{number + 1}"

    def start(self, python, *words, log, **environ):
        """Start a program in the directory of its log, where it finds its modules."""
        command = ["ip", "netns", "exec", self.name, python, "-m", *words]
        with open(log, "w") as file:
            return subprocess.Popen(
                command, env={**ENVIRON, **environ}, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent
            )

    def plug(self, state):
        ip("-n", self.name, "link", "set", self.cable, state)

    def ranks(self):
        """The processes in it that train."""
        return [process.pid for process in self._processes() if "RANK" in process.environ()]

    def kill(self):
        for process in self._processes():
            process.kill()

    def _processes(self):
        pids = map(int, ip("netns", "pids", self.name).split())
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def hosts():
    """Two of them. Their names are known to both, or each look for one would wait for a server of names."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making network namespaces takes root and iproute2")
    both = Host(0), Host(1)
    try:
        connect(*both)
        yield both
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the kernel does not let us make network namespaces: {error.stderr}")
    finally:
        for host in both:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{host.name}", ignore_errors=True)


def connect(first, second):
    for host in (first, second):
        ip("netns", "add", host.name)
        names = Path(f"/etc/netns/{host.name}/hosts")
        names.parent.mkdir(parents=True)
        names.write_text(
            f"127.0.0.1 localhost {os.uname().nodename}\n{first.address} first\n{second.address} second\n"
        )
    ip(
        "link",
        "add",
        first.cable,
        "netns",
        first.name,
        "type",
        "veth",
        "peer",
        "name",
        second.cable,
        "netns",
        second.name,
    )
    for host in (first, second):
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
        ip("-n", host.name, "link", "set", "lo", "up")
        host.plug("up")


@pytest.fixture(scope="module")
def small(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    (directory / "slow.py").write_text(SLOW)
    return SmallRun.at(directory, model_dir)


@pytest.fixture(scope="module")
def launched(hosts, small, warm_python):
    """Starts a run with `rl4llm launch` on both hosts; whatever still runs in the end is killed."""

    @contextmanager
    def run(name, *words):
        def start(host):
            place = ["--nnodes", "2", "--node-rank", str(host.number), "--rendezvous", RENDEZVOUS]
            log = small.directory / f"{name}-{host.number}.log"
            own = {"log": log, "PYTHON_EXEC": warm_python}
            return host.start(warm_python, "rl4llm", "launch", *small.into(name), *place, *words, **own)

        processes = [start(host) for host in hosts]
        try:
            yield processes
        finally:
            for host in hosts:
                host.kill()

    return run


def until(reached, what):
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, f"not {what} after {PATIENCE_S} s"
        time.sleep(0.05)


def trained(ranks, config, *overrides):
    sys.path.insert(0, str(Path(config).parent))
    with build_trainer(load_config(config, overrides)) as trainer:
        trainer.train()


def test_two_machines_restart_after_a_pulled_cable(hosts, small, launched, on_ranks, sweep):
    """The weights are those of one machine. A sweep also kills a process, as test_launch_ranks does on one machine."""
    keys = [f"max_steps={24 if sweep else 12}", "rewards=['slow:slow']"]
    on_ranks(trained, *small.into("one", *keys))
    with launched("two", *keys, "timeout_s=10", "--restarts", "3") as processes:
        until(lambda: small.steps("two") >= 6, "at step 6")
        if sweep:
            (rank,) = hosts[1].ranks()
            os.kill(rank, signal.SIGKILL)
            until(lambda: not psutil.pid_exists(rank) and small.steps("two") >= 13, "at step 13")
        hosts[1].plug("down")
        logs = [small.directory / f"two-{host.number}.log" for host in hosts]
        until(lambda: all("for more than 10 s (timeout_s)" in log.read_text() for log in logs), "told")
        hosts[1].plug("up")
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    assert not sweep or "lost the connection to the others" in logs[0].read_text()
    assert all("restarting it" in log.read_text() for log in logs)
    assert small.weights("two") == small.weights("one")


@pytest.mark.sweep
def test_torchrun_joins_two_machines(hosts, small):
    def start(host):
        first = str(host.number == 0).lower()
        place = [
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={RENDEZVOUS}", f"--rdzv-conf=is_host={first}",
        ]  # fmt: skip
        run = [f"--local-addr={host.address}", "-m", "rl4llm", "train", *small.into("torchrun")]
        log = small.directory / f"torchrun-{host.number}.log"
        return host.start(
            sys.executable, "torch.distributed.run", *place, *run, log=log, GLOO_SOCKET_IFNAME=host.cable
        )

    processes = [start(host) for host in hosts]
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    assert small.steps("torchrun") == 2
