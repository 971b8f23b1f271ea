"""A run that dies is started again from its last checkpoint, as long as it gets further."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import yaml
from forked_python import started
from safetensors.torch import load_file

from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch import ranks
from rl4llm.extensions.launch.ranks import Nodes, Supervisor

COUNTS_AND_DIES = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
tries = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(tries))
sys.exit(0 if tries == int(sys.argv[2]) else 9)
"""


@pytest.mark.parametrize(("succeeds_at", "progress", "restarts", "expected"), [
    (4, [None, 2, 2, 4, 4, 6, 6], 1, (0, 4)),  # with progress it is always restarted
    (99, [2] * 8, 2, (9, 3)),
    (99, [None] * 4, 5, (9, 1)),
    (99, [None, 2], 0, (9, 1)),
])  # fmt: skip
def test_run_restarts_while_it_saves(tmp_path, monkeypatch, succeeds_at, progress, restarts, expected):
    monkeypatch.setattr(ranks, "LONGEST_WAIT_S", 0.0)
    count, lines, looks = tmp_path / "count", [], iter(progress)
    command = [sys.executable, "-c", COUNTS_AND_DIES, str(count), str(succeeds_at)]
    code = Supervisor(command, lambda: next(looks), restarts, lines.append).run()
    assert (code, int(count.read_text())) == expected
    assert len(lines) == expected[1] - (code == 0)


SUPERVISE = """
import sys
from rl4llm.extensions.launch.ranks import Supervisor
sys.exit(Supervisor(sys.argv[1:], lambda: 2, 5, print).run())
"""


@pytest.fixture
def supervised(tmp_path):
    """Return supervised(*command): a program that supervises this command."""
    (tmp_path / "supervise.py").write_text(SUPERVISE)
    return lambda *command: started(tmp_path / "supervise.py", *command)


def test_a_signal_is_passed_on_and_the_run_is_not_started_again(supervised):
    child = "import signal, time; signal.signal(15, lambda *a: exit(1)); print(1, flush=True); time.sleep(9)"
    with supervised(sys.executable, "-c", child) as program:
        while program.out.read_text() != "1\n":
            assert program.process.is_alive(), program.err.read_text()
            time.sleep(0.05)
        os.kill(program.process.pid, signal.SIGINT)
        start = time.monotonic()
        assert program.end(30).returncode == 75
        assert time.monotonic() - start < 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_signal_between_two_attempts_starts_nothing(tmp_path):
    count, looks = tmp_path / "count", iter([1, 2, 2])

    def say(line):  # "starting it again", behind which the supervisor waits for a second
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    command = [sys.executable, "-c", COUNTS_AND_DIES, str(count), "2"]
    assert Supervisor(command, lambda: next(looks), 9, say).run() == 75
    assert count.read_text() == "1"


def test_killed_launcher_leaves_no_training_processes(supervised):
    with supervised("sleep", "300") as program:
        while (
            not (children := psutil.Process(program.process.pid).children()) or children[0].name() != "sleep"
        ):
            time.sleep(0.05)
        program.process.kill()
    psutil.wait_procs(children, timeout=30)
    assert not children[0].is_running()


LINGERS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)
subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"])
time.sleep(300)
"""


def test_launcher_waiting_for_a_lost_machine_is_killed(monkeypatch):
    monkeypatch.setattr(ranks, "LINGERS_S", 0.5)
    assert Supervisor([sys.executable, "-c", LINGERS], lambda: 2, 0, print).run() == -signal.SIGKILL


def test_several_machines_meet_at_the_first_one():
    second = Nodes(nproc=8, nnodes=2, node_rank=1, rendezvous="127.0.0.1:29500")
    words = {
        "--nnodes=2",
        "--rdzv-endpoint=127.0.0.1:29500",
        "--rdzv-conf=is_host=false",
        "--local-addr=127.0.0.1",
    }
    assert words <= {*second.torchrun()} and "--standalone" not in second.torchrun()
    assert second.environ() == {"GLOO_SOCKET_IFNAME": "lo"}
    assert "--standalone" in Nodes(nproc=2).torchrun()
    assert Nodes(nproc=2).environ() == {}


def test_loopback_rendezvous_is_refused_for_several_machines(monkeypatch):
    here = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29500))]
    # as some systems name themselves
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: here)
    with pytest.raises(ConfigError):
        Nodes(nnodes=2, rendezvous="trainer:29500").torchrun()


def test_torchrun_ends_with_the_code_of_a_rank_and_one_line(tmp_path):
    (tmp_path / "rank.py").write_text("import sys; sys.exit('no model')")
    done = subprocess.run([*Nodes().torchrun(), str(tmp_path / "rank.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["no model", "Rank 0 exited with code 1; see its output above."]


@pytest.fixture
def config(model_dir, tmp_path):
    """A run of six steps, with a checkpoint after every second one."""
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": str(i)} for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = {
        "model": {"path": str(model_dir), "autocast": "none"},
        "data": {"path": str(tmp_path / "rows.jsonl")}, "rewards": ["vowels:Vowels"],
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 5}, "training": {"lr": 3e-3}, "eval": {"every": 0},
        "checkpoint": {"every": 2}, "output": {"dir": str(tmp_path / "run")}, "deterministic": True, "max_steps": 6,
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(chosen))
    return tmp_path / "config.yaml"


def trained(ranks, config, directory):
    with build_trainer(load_config(config, [f"output.dir={directory}"])) as trainer:
        trainer.train()


def launched(config, python, kills, *flags):
    """Launch a run of two ranks and kill one of them when there is a new checkpoint; return the exit code and the output."""
    latest = config.parent / "run" / "checkpoints" / "latest"
    before = latest.read_text() if latest.exists() else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("PYTHON_EXEC", python)
        launcher = started("-m", "rl4llm", "launch", config, "--nproc", "2", *flags)
        with launcher as program:
            while program.process.is_alive() and (not latest.exists() or latest.read_text() == before):
                time.sleep(0.01)
            ranks = [
                child
                for child in psutil.Process(program.process.pid).children(recursive=True)
                if "train" in child.cmdline()
            ]
            ranks = [child for child in ranks if "rl4llm.extensions.launch.torchrun" not in child.cmdline()]
            sorted(ranks, key=lambda child: child.environ()["RANK"])[kills].kill()
            done = program.end(200)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_run_whose_rank_is_killed_ends_with_the_same_weights(
    on_ranks, config, model_dir, tmp_path, warm_python
):
    code, said = launched(config, warm_python, 0, "--restarts", "1")
    assert code == 0
    assert "restarting it (0 restarts in a row without a new checkpoint)" in said
    on_ranks(trained, config, tmp_path / "whole")
    ended, expected = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")
    )
    assert any(
        (tensor != load_file(model_dir / "model.safetensors")[name]).any() for name, tensor in ended.items()
    )
    assert [name for name in ended | expected if not torch.equal(ended[name], expected[name])] == []
