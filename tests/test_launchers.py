"""Whoever starts the processes, the run is the same, to the last bit."""

import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist
from forked_python import python
from small_run import SmallRun

from rl4llm.cli import main
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.runtime.ports import free_port
from rl4llm.runtime.ranks import join_ranks

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def small(model_dir, tmp_path_factory):
    return SmallRun.at(tmp_path_factory.mktemp("small"), model_dir)


@pytest.fixture(scope="module")
def expected(small, on_ranks):
    """Return the weights of two processes that no launcher started; `rl4llm launch` gives the same (test_launch_ranks)."""
    on_ranks(trained, *small.into("forked"))
    return small.weights("forked")


def trained(ranks, config, *overrides):
    with build_trainer(load_config(config, overrides)) as trainer:
        trainer.train()


def started(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, env=ENVIRON)
    assert done.returncode == 0, done.stdout + done.stderr


def launcher(name):
    found = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    return found or pytest.skip(f"there is no {name} here")


@pytest.mark.sweep  # `rl4llm launch` does it the same way: tests/extensions/launch/test_launch_ranks.py
def test_torchrun_starts_the_same_run(small, expected):
    started(
        launcher("torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rl4llm",
        "train",
        *small.into("torchrun"),
    )
    assert small.weights("torchrun") == expected


def test_accelerate_starts_the_same_run(small, expected, warm_python):
    words = ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port("127.0.0.1"))]
    program = [warm_python, launcher("accelerate")]
    started(*program, "launch", *words, "-m", "rl4llm", "train", *small.into("accelerate"))
    assert small.weights("accelerate") == expected


@pytest.mark.deepspeed
def test_deepspeed_starts_the_same_run(small, expected, warm_python):
    words = ["--num_gpus", "2", "--master_port", str(free_port("127.0.0.1")), "--module", "rl4llm", "train"]
    started(warm_python, launcher("deepspeed"), *words, *small.into("deepspeed"))
    assert small.weights("deepspeed") == expected


@pytest.mark.sweep
@pytest.mark.deepspeed
def test_deepspeed_starts_the_same_run_on_two_machines(small, expected):
    hosts = small.directory / "hosts"
    hosts.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    first = ["--master_addr", "127.0.0.1", "--master_port", str(free_port("127.0.0.1"))]
    command = [launcher("deepspeed"), "--hostfile", str(hosts), "--no_ssh", *first, "--module", "--node_rank"]
    run = ["rl4llm", "train", *small.into("hostfile")]
    with subprocess.Popen([*command, "1", *run], env=ENVIRON, stdout=subprocess.DEVNULL) as other:
        started(*command, "0", *run)
        assert other.wait(60) == 0
    assert small.weights("hostfile") == expected


def test_a_local_rank_that_a_launcher_puts_first_is_taken(capsys):
    for option in ("--local_rank=0", "--local-rank=1"):
        assert main([option, "train", "no_such_file.yaml"]) == 1
        assert "no_such_file.yaml" in capsys.readouterr().err


def test_an_incomplete_launch_of_several_processes_is_refused():
    prepared = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="--cpu` starts one process"):
        join_ranks(1, prepared)
    assert join_ranks(1, {"ACCELERATE_USE_CPU": "True"}).size == 1


@pytest.mark.parametrize(("variables", "warned"), [
    ({"ACCELERATE_MIXED_PRECISION": "no"}, False),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, True),
    ({"ACCELERATE_USE_FSDP": "true"}, True),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, True),
    ({"ACCELERATE_USE_FSDP": "true", "RANK": "1"}, False),
])  # fmt: skip
def test_what_accelerate_asks_for_in_vain_is_logged(variables, warned, caplog):
    join_ranks(1, variables)
    assert ("accelerate" in caplog.text) == warned


JOINS = """
import sys
from rl4llm.core.errors import RanksError
from rl4llm.runtime.ranks import join_ranks
try:
    join_ranks(1)
except RanksError as error:
    sys.exit(str(error))
"""


def test_a_rank_that_finds_no_network_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "joins.py").write_text(JOINS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "nonesuch"}
    for variable, value in {**torchrun, **place}.items():
        monkeypatch.setenv(variable, value)
    done = python(tmp_path / "joins.py", timeout=120)
    assert "Rank 0 of 2 could not connect to" in done.stderr
    assert "set GLOO_SOCKET_IFNAME" in done.stderr
