"""A run on a real Ray cluster of this machine, of which an actor is killed; where Ray is installed, which CI does not do."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from small_run import CONFIG, SmallRun

pytest.importorskip("ray", reason="ray is not installed: pip install 'rl4llm[ray]'")
DRIVES = "import sys; from rl4llm.launch.ray import drive; sys.exit(drive(sys.argv[1], sys.argv[2:]))"


def holders():
    return [process for process in psutil.process_iter() if process.name().startswith("ray::Holder")]


def test_two_ranks_and_a_host_go_on_when_an_actor_is_killed(model_dir, tmp_path):
    small = SmallRun(tmp_path)
    roles = {"nproc": 2, "env_hosts": 1}
    chosen = {"model": {"path": str(model_dir), "device": "cpu"}, "env": {"name": "chat"}, "launch": roles}
    output = {"output": {"dir": str(tmp_path / "run")}, "max_steps": 40}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **chosen, **output}))
    ray = shutil.which("ray") or str(Path(sys.executable).with_name("ray"))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RL4LLM_ENV_TOKEN": "token"}
    start = [ray, "start", "--head", "--port=6399", "--num-cpus=4", f"--temp-dir={tmp_path / 'ray'}"]
    subprocess.run(start, env=environ, check=True, capture_output=True)
    try:
        command = [sys.executable, "-c", DRIVES, str(tmp_path / "run.yaml"), sys.executable, "-m", "rl4llm"]
        with subprocess.Popen(command, env=environ) as driver:
            end = time.monotonic() + 300
            while small.steps("run") < 10:
                assert driver.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            held = [child for process in holders() for child in process.children(recursive=True)]
            trainer = next(process.parent().parent() for process in held if process.cmdline()[-2:] == ["--as", "trainer"])
            trainer.send_signal(signal.SIGKILL)
            assert driver.wait(300) == 0
        assert small.steps("run") == 40
    finally:
        subprocess.run([ray, "stop", "--force"], env=environ, check=False, capture_output=True)
