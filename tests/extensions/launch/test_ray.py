"""A run on a real Ray cluster of this machine, where the test kills an actor. CI has no Ray and skips it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from small_run import CONFIG, SmallRun

pytest.importorskip("ray", reason="ray is not installed, 400 MB: pip install -e '.[ray]'")
DRIVES = (
    "import sys; from rl4llm.extensions.launch.ray import drive; sys.exit(drive(sys.argv[1], sys.argv[2:]))"
)


def holders():
    found = psutil.process_iter(["name"])
    return [process for process in found if (process.info["name"] or "").startswith("ray::Holder")]


@pytest.fixture(scope="module")
def cluster():
    """The environment of a driver, on a cluster of this machine that is gone afterwards."""
    ray = shutil.which("ray") or str(Path(sys.executable).with_name("ray"))
    keys = {"RL4LLM_ENV_TOKEN": "token", "RAY_ADDRESS": "127.0.0.1:6399"}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **keys}
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp"
    ) as short:  # Ray's sockets lie in it, by at most 107 letters
        start = [
            ray,
            "start",
            "--head",
            "--port=6399",
            "--num-cpus=4",
            f"--temp-dir={short}",
            "--include-dashboard=false",
        ]
        try:
            done = subprocess.run(start, env=environ, check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            yield environ
        finally:
            subprocess.run([ray, "stop", "--force"], env=environ, check=False, capture_output=True)


@pytest.fixture
def write(model_dir, tmp_path):
    """write(steps, nproc): the configuration of a run of two ranks and a host."""

    def write(steps, **roles):
        chosen = {"model": {"path": str(model_dir), "device": "cpu"}, "env": {"name": "chat"}}
        output = {
            "output": {"dir": str(tmp_path / "run")},
            "max_steps": steps,
            "launch": {"env_hosts": 1, **roles},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **chosen, **output}))
        return [sys.executable, "-c", DRIVES, str(tmp_path / "run.yaml"), sys.executable, "-m", "rl4llm"]

    return write


def until(step, small, driver):
    end = time.monotonic() + 300
    while small.steps("run") < step:
        assert driver.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


def nothing_left(tmp_path):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        left = [line for line in words if str(tmp_path) in line]
        if not left and not holders():
            return True
        time.sleep(0.2)
    return False


def test_ray_run_survives_killed_actors_and_saves_when_stopped(cluster, write, tmp_path):
    small = SmallRun(tmp_path)
    command = write(400, nproc=2)
    with subprocess.Popen(command, env=cluster) as driver:
        until(10, small, driver)
        for process in holders():
            if any(child.cmdline()[-2:] == ["--as", "trainer"] for child in process.children(recursive=True)):
                process.send_signal(signal.SIGKILL)
        killed_at = small.steps("run")
        until(killed_at + 10, small, driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(300) == 75
    assert small.steps("run") < 400
    assert nothing_left(tmp_path)
    command = write(small.steps("run") + 2, nproc=2)
    with subprocess.Popen(command, env=cluster) as driver:
        assert driver.wait(300) == 0
    assert nothing_left(tmp_path)


def test_cluster_without_room_is_reported_and_then_given_up(cluster, write, tmp_path):
    command = write(2, nodes=9)
    command[2] = (
        "import rl4llm.extensions.launch.ray as r; r.SAY_EVERY_S = 1; r.PLACED_WITHIN_S = 3; " + command[2]
    )
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "Waiting 1 s for room in the cluster (CPU: 10 requested, 4 in the cluster" in done.stderr
    assert "The Ray cluster had no room within 3 s" in done.stderr
    assert nothing_left(tmp_path)
