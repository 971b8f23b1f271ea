"""The app goes through Modal's own client up to a stand-in of its control plane. Nothing here has an account."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.launchers import launch_on
from rl4llm.extensions.launch.modal import CONFIG as IN_CONTAINER
from rl4llm.extensions.launch.roles import part

modal = pytest.importorskip("modal", reason="modal is not installed: pip install 'rl4llm[modal]'")
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


def test_containers_start_the_trainer_and_a_server_of_the_run(tmp_path, monkeypatch):
    """What each of them does with the volume is tried below, and weights that appear late in tests/extensions/servers."""
    from rl4llm.extensions.launch import modal_app

    config, calls = tmp_path / "config.yaml", []
    config.write_text(yaml.safe_dump(GPUS | {"rewards": ["math"]}))
    monkeypatch.setattr(modal_app, "CONFIG", str(config))
    monkeypatch.setattr(modal_app, "_volume", lambda: SimpleNamespace(commit="commit", reload="reload"))
    monkeypatch.setattr(modal_app, "_synced", lambda *call: calls.append(call) or 0)
    monkeypatch.setenv("RL4LLM_NUMBER", "1")
    modal_app.actor(["https://a", "https://b"])
    modal_app.worker()
    (commit, trainer, environ, place), (reload, server, others, outside) = calls
    assert (commit, place, reload, outside) == ("commit", Path("/shared"), "reload", Path("/"))
    assert trainer[1:4] == server[1:4] == ["-m", "rl4llm", "launch"]
    words = part(*launched(trainer), environ)
    assert {'inference.url=["https://a", "https://b"]', "inference.visible_within_s=600.0"} <= {*words}
    assert "sandbox.level=rl4llm.extensions.launch.modal_app:Programs" in words
    words = part(*launched(server), {**others, "RL4LLM_NUMBER": "1"})
    assert words[-4:] == ["--host", "0.0.0.0", "--port", "30001"]


def launched(command):
    """Return the configuration, the overrides and the role of a command line."""
    config, *overrides, option, role = command[4:]
    assert option == "--as"
    return config, overrides, role


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
