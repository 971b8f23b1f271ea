"""The app goes through Modal's own client up to a stand-in of its control plane, and the bodies of its functions train
together in two containers of this machine, over a volume that keeps Modal's rules. Nothing here has an account.
"""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from modal_containers import SGLANG, Containers
from small_run import CONFIG

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.launchers import launch_on
from rl4llm.extensions.launch.modal import CONFIG as IN_CONTAINER

modal = pytest.importorskip("modal", reason="modal is not installed: pip install 'rl4llm[modal]'")
STEPS = 3
GPUS = {
    "model": {"path": "hub/model"},
    "data": {"path": "arithmetic"},
    "rewards": ["mine_for_modal:short", "math"],
    "inference": {"name": "sglang"},
    "launch": {"nproc": 8, "gpu": "H100", "servers": 2, "server_gpus": 2, "server_gpu": "L40S"},
    "output": {"dir": "runs/Big_Run"},
}


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """Whoever runs this; and a key for servers, as who starts a run has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    monkeypatch.setenv("RL4LLM_SERVER_KEY", "5ecret")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def written(tmp_path):
    """written(*overrides, options={...}): the directory with the app of a run on GPUs."""

    def write(*overrides, options):
        (tmp_path / "big.yaml").write_text(yaml.safe_dump(GPUS))
        (tmp_path / "mine_for_modal.py").write_text("def short(completions, **columns): ...\n")
        place = {"options": options, "out": tmp_path / "on modal", "submit": False, "say": lambda text: None}
        assert launch_on("modal", "big.yaml", overrides, **place) == 0
        return place["out"]

    return write


def modal_run(directory, plane, *words):
    path = os.pathsep.join([str(directory.parent), os.environ.get("PYTHONPATH", "")])
    where = {"cwd": directory, "env": {**os.environ, **plane.environ, "PYTHONPATH": path}}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", "modal", "run", *words], **where, **pipes)


def until(holds, seconds=180):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_modal_client_starts_trainer_and_servers_on_their_gpus(written):
    from modal_plane import api_pb2, control_plane

    from rl4llm.extensions.launch.modal_app import _environ

    directory = written(options={"volume": "disk", "extras": "deepspeed", "secret": "tokens"})
    assert "5ecret" not in "".join(file.read_text() for file in directory.iterdir())
    with control_plane() as plane, modal_run(directory, plane, "--detach", "modal_app.py::train") as process:
        until(lambda: plane.of("FunctionGetOutputs") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
    assert "The detached App will keep running" in said, said
    assert plane.of("AppCreate")[0].app_state == api_pb2.APP_STATE_DETACHED
    assert not plane.of("AppStop") + plane.of("FunctionCallCancel")
    check_functions([request.function for request in plane.of("FunctionCreate")])
    check_secrets(plane)
    assert [request.deployment_name for request in plane.of("VolumeGetOrCreate")] == ["disk"]
    (call,) = plane.of("FunctionMap")
    args, _ = pickle.loads(call.pipelined_inputs[0].input.args)
    assert args == (["https://server-0.modal.direct", "https://server-1.modal.direct"],)
    built = " ".join(
        line for request in plane.of("ImageGetOrCreate") for line in request.image.dockerfile_commands
    )
    assert "deepspeed" in built and "modal==" in built  # processes that Modal does not start import it, too
    assert "/opt/sglang/bin/pip install 'sglang" in built
    files = {file.filename for request in plane.of("MountGetOrCreate") for file in request.files}
    assert {IN_CONTAINER, "/root/rl4llm/extensions/launch/modal_app.py", "/root/mine_for_modal.py"} <= files
    assert "/root/rl4llm/extensions/view/page/style.css" in files  # what is not Python, too
    # for processes that Modal does not start itself
    assert _environ([])["PYTHONPATH"].split(os.pathsep)[0] == "/root"
    assert not [name for name in files if "__pycache__" in name]


def check_functions(functions):
    from rl4llm.extensions.launch import modal_app

    by_name = {function.function_name: function for function in functions}
    gpus = {name: found.resources.gpu_config for name, found in by_name.items()}
    asked = {name: (found.gpu_type, found.count) for name, found in gpus.items()}
    assert asked == {"trainer": ("H100", 8), "server-0": ("L40S", 2), "server-1": ("L40S", 2)}
    assert by_name["trainer"].timeout_secs == 24 * 3600
    assert by_name["trainer"].retry_policy.retries > 0
    for number in range(2):
        server = by_name[f"server-{number}"]
        scale = server.autoscaler_settings
        assert (scale.min_containers, scale.max_containers) == (1, 1)  # new weights go to one address each
        assert server.http_config.port == 30000 + number
        assert server.startup_timeout_secs >= 600
    for function in functions:  # by module and name it is found in a container
        assert function.module_name == modal_app.__name__
        assert hasattr(modal_app, function.implementation_name.removesuffix(".*"))
        assert [mount.mount_path for mount in function.volume_mounts] == ["/shared"]


def check_secrets(plane):
    requests = plane.of("SecretGetOrCreate")
    secrets = [dict(request.env_dict) for request in requests]
    assert {"RL4LLM_SERVER_KEY": "5ecret"} in secrets
    assert sorted(item["RL4LLM_NUMBER"] for item in secrets if "RL4LLM_NUMBER" in item) == ["0", "1"]
    assert "tokens" in {request.deployment_name for request in requests}


def test_modal_sandbox_has_no_network_secrets_or_volume():
    from modal_plane import api_pb2, control_plane

    make = "from rl4llm.extensions.launch.modal_app import Programs; Programs()"
    with control_plane() as plane:
        with subprocess.Popen([sys.executable, "-c", make], env={**os.environ, **plane.environ}) as process:
            until(lambda: plane.of("SandboxCreateV2") or process.poll() is not None)
            process.kill()  # it would wait for the sandbox for ever
        (request,) = plane.of("SandboxCreateV2")
        assert request.definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        assert not request.definition.secret_ids and not request.definition.volume_mounts
        files = {file.filename for request in plane.of("MountGetOrCreate") for file in request.files}
        assert "/root/rl4llm/extensions/sandbox/serve.py" in files


def test_a_sandbox_whose_process_does_not_start_is_thrown_away(monkeypatch):
    """It would be there, and paid for, until its day is over."""
    from rl4llm.extensions.launch import modal_app

    class Sandbox:
        thrown_away = False

        def exec(self, *words, **options):
            raise modal_app.modal.exception.ConnectionError("gone")

        def terminate(self):
            self.thrown_away = True

    made = Sandbox()
    monkeypatch.setattr(modal_app.modal.App, "lookup", lambda *name, **options: None)
    monkeypatch.setattr(modal_app.modal.Sandbox, "create", lambda **options: made)
    with pytest.raises(OSError):
        modal_app.Programs()
    assert made.thrown_away


def test_modal_image_contains_the_named_modules():
    from rl4llm.extensions.launch.modal_app import _named_modules

    named = {
        "env": {"name": "mine.envs:Env", "opponents": {"con": {"model": "llama3:latest"}}},
        "rewards": ["short:reward", {"name": "llm_judge", "model": "qwen:latest"}],
        "backend": {"name": "backends:Mine"},
        "sandbox": {"level": "rooms:Room"},
    }
    config = load_config(overrides={"model.path": "m", **named})
    assert _named_modules(config) == ["backends", "mine", "rooms", "short"]


@pytest.mark.parametrize("override", [
    "launch.nodes=2", "launch.router=true", "launch.env_hosts=1", "launch.gpu=null", "output.dir=/data/x", "output.dir=../x",
    "sync.dir=/weights", "sync.name=lora", "inference.api_key=abc", "--option volum=x",
])  # fmt: skip
def test_modal_refuses_unsupported_runs_before_writing(override, written, tmp_path):
    with pytest.raises(ConfigError):
        written(*([] if "--" in override else [override]), options={"volum": "x"} if "--" in override else {})
    assert not (tmp_path / "on modal").exists()


@pytest.mark.sweep  # what each of them does with the volume is tried below, and served weights in tests/extensions/servers
def test_actor_and_worker_train_together_over_a_volume(model_dir, tmp_path, monkeypatch):
    """The worker boots from a version of long ago, and proves each new one, which it sees by commit and reload alone."""
    own = {"model": {"path": "model", "device": "cpu", "autocast": "none"}, "inference": {"name": "sglang"}}
    roles = {"launch": {"servers": 1, "server_gpus": 0}, "output": {"dir": "runs/small"}, "max_steps": STEPS}
    roles["sync"] = {"dir": "runs/small/weights"}  # both containers are processes of this machine here
    containers = Containers(tmp_path, {**CONFIG, **own, **roles, "checkpoint": {"every": 1, "keep": 3}})
    shutil.copytree(model_dir, containers.committed / "model")
    tests = Path(__file__).parents[2]
    sglang = tmp_path / "sglang"
    path = [str(tests.parent), str(tests), str(tests / "extensions" / "servers")]
    sglang.write_text(SGLANG.format(python=sys.executable, path=path))
    sglang.chmod(0o755)
    worker = containers.start("worker", "worker", RL4LLM_NUMBER="0", RL4LLM_SGLANG_PYTHON=str(sglang))
    actor = containers.start("actor", "actor", ["http://127.0.0.1:30000"])
    try:
        until(lambda: actor.poll() is not None or worker.poll() is not None, 600)
        assert actor.poll() == 0, containers.said("actor") + containers.said("worker")
        with urllib.request.urlopen("http://127.0.0.1:30000/model_info") as answer:
            assert json.load(answer)["weight_version"] == str(STEPS)
    finally:
        for process in (actor, worker):
            process.terminate()
            process.wait()
    run = containers.committed / "runs" / "small"
    assert (run / "weights" / "LATEST").read_text().strip() == f"v{STEPS:06d}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("time/verify" in row and row["mismatch/max"] < 1e-4 for row in rows)
    seen = tmp_path / "worker" / "runs" / "small" / "weights"
    assert (seen / "LATEST").exists(), "the worker has its own view, which it reloaded"


TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("saved", "w"), sys.exit(75)))
open("begun", "w")
time.sleep(60)
"""


def test_modal_trainer_saves_before_the_last_commit(tmp_path):
    """Modal interrupts the call, and gives it half a minute."""
    from rl4llm.extensions.launch.modal_app import _synced

    commits = []

    def commit():
        commits.append((tmp_path / "saved").exists())
        if len(commits) == 1:
            raise RuntimeError("there are open files preventing the operation")

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        with pytest.raises(KeyboardInterrupt):
            _synced(commit, [sys.executable, "-c", TRAINER], {}, tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert commits[:2] == [False, False]  # a commit that failed is made again
    assert commits[-1]


def test_modal_server_ends_its_container_and_reports_once(capfd):
    from rl4llm.extensions.launch.modal_app import _synced

    def reload():
        raise RuntimeError("there are open files preventing the operation")

    words = [sys.executable, "-c", "import time; time.sleep(4); raise SystemExit(9)"]
    assert _synced(reload, words, {}, Path("/")) == 9
    assert capfd.readouterr().err.count("there are open files") == 1
