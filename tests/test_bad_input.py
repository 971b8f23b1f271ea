"""What every command says to input that cannot be right: one clear line, no traceback, and an exit code that is not 0."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from rl4llm.cli import COMMANDS, build_parser, main
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.rewards import REWARDS

ROOT = Path(__file__).parents[1]
SMALL = {
    "data": {"path": "arithmetic", "limit": 4},
    "eval": {"limit": 2},
    "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 10}],
    "rollout": {"prompts": 1, "group_size": 2, "max_tokens": 2},
    "max_steps": 1,
}

CASES = """
wrong path      | train nowhere.yaml                               | No such file or directory: 'nowhere.yaml'
wrong path      | launch nowhere.yaml                              | No such file or directory: 'nowhere.yaml'
wrong path      | collect nowhere.yaml --out x.jsonl               | No such file or directory: 'nowhere.yaml'
wrong path      | train small.yaml model.path=./nowhere            | nowhere
wrong path      | train .                                          | Is a directory: '.'
wrong path      | eval small.yaml --out nowhere/x.json             | nowhere/x.json cannot be written: No such file
wrong path      | eval small.yaml --compare nowhere.json           | nowhere.json
wrong path      | grade nowhere.jsonl                              | The dataset 'nowhere.jsonl' does not exist
wrong path      | export nowhere --out x                           | nowhere is not a run
wrong path      | view nowhere                                     | 'nowhere' does not exist
wrong path      | run nowhere.py                                   | nowhere.py is not a file of Python
wrong path      | run small.yaml                                   | small.yaml is not a file of Python
wrong path      | recipe quickstart --dir small.yaml                      | small.yaml
wrong path      | import nowhere.yaml                              | The file nowhere.yaml does not exist
another version | import damaged.yaml                              | damaged.yaml cannot be read
wrong path      | serve env --env nowhere --port 0                 | 'nowhere' is unknown
broken run      | train small.yaml output.dir=broken               | run.json is damaged
broken run      | eval small.yaml output.dir=broken                | No checkpoint in broken/checkpoints can be used
broken run      | export broken --out x                            | No checkpoint in broken/checkpoints can be used
broken run      | check broken/failed/step-000001                 | holds no optimizer step
broken run      | check broken/failed/step-000002                 | holds no optimizer step
broken run      | view small.yaml                                  | is not a directory
another version | launch other.yaml                                | other.yaml: Unknown configuration key 'rollout.batch'
another version | train damaged.yaml                               | damaged.yaml: not valid YAML
another version | train list.yaml                                  | list.yaml: the content
another version | train empty.yaml                                 | model.path is not set
another version | train refers.yaml                                | model.path: Interpolation key 'nowhere' not found
no such device  | train small.yaml model.device=cuda:99            | model.device='cuda:99' is not available: torch
no such device  | plan small.yaml model.device=cuda:99             | `rl4llm plan --device-memory`
port in use     | view broken --port {port}                        | --port {port} cannot be used
port in use     | serve env --env chat --port {port}               | Port {port}
port in use     | serve --model-path {model} --python {python} --port {port} | Port {port}
read-only       | train small.yaml output.dir={locked}/run         | {locked}/run
read-only       | eval small.yaml --out {locked}/x.json            | {locked}/x.json cannot be written
read-only       | collect small.yaml --out {locked}/x.jsonl        | {locked}
read-only       | view broken --export {locked}/x.html             | {locked}/x.html cannot be written
read-only       | recipe quickstart --dir {locked}/quick                  | {locked}/quick
not accepted    | view broken --port 99999                         | 0-65535. Next: use another port
no number       | train small.yaml training.lr=inf                 | training.lr=inf is not accepted: a finite number
no number       | train small.yaml training.lr=${{                 | training.lr: no viable alternative
no number       | train small.yaml threads=100000                  | threads=100000 is not accepted: a whole number, 0 to
no such recipe  | recipe run nowhere                               | recipe='nowhere' is unknown. Known:
no number       | recipe quickstart --dir quick --seed -1                 | seed=-1 is not accepted
too much        | train small.yaml rollout.prompts=1000000000000000 | MemoryError: Unable to allocate
no class        | train small.yaml env.name=os:path                | Accepted: a subclass of BaseMDPEnv
no address      | train small.yaml inference.name=sglang inference.url=http://127.0.0.1:99999 | http://HOST:PORT
no class        | serve env --env chat --port 0 sandbox.level=nowhere | sandbox.level='nowhere' is unknown
wrong value     | launch small.yaml training.updates_per_rollout=9 | Use at most one per prompt (1)
wrong value     | launch small.yaml output.dir=small.yaml          | output.dir='small.yaml' is a file, not a directory
wrong path      | launch small.yaml model.path=./nowhere           | model.path='./nowhere' does not exist
wrong path      | launch small.yaml data.path=smal.yaml            | The dataset 'smal.yaml' does not exist
no address      | train small.yaml env.remote=3                    | env.remote=3 is not accepted
no file         | view broken --export pipe                        | pipe cannot be written: it exists but is not a regular
not accepted    | info --completion csh                            | invalid choice
not accepted    | collect small.yaml                               | required: --out
not accepted    | eval small.yaml --k 2                            | would give the same answer
"""
TABLE = [tuple(cell.strip() for cell in line.split("|")) for line in CASES.strip().splitlines()]


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """Return a directory in which even root can create nothing."""
    directory = tmp_path_factory.mktemp("locked")
    if os.geteuid():
        directory.chmod(0o555)
        yield directory
        directory.chmod(0o755)
        return
    ways = (
        (["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", directory], ["umount", directory]),
        (["chattr", "+i", directory], ["chattr", "-i", directory]),
    )
    for lock, unlock in ways:
        if shutil.which(lock[0]) and subprocess.run(lock, capture_output=True).returncode == 0:
            yield directory
            subprocess.run(unlock, check=True)
            return
    pytest.skip("root can write everywhere here: neither mount nor chattr may be used")


@pytest.fixture(scope="module")
def place(model_dir, tmp_path_factory):
    """Return a directory with a configuration, one of another version, and a run in which everything is damaged."""
    directory = tmp_path_factory.mktemp("place")
    small = {**SMALL, "model": {"path": str(model_dir)}, "output": {"dir": "run"}}
    (directory / "small.yaml").write_text(yaml.safe_dump(small))
    (directory / "other.yaml").write_text(yaml.safe_dump({**small, "rollout": {"batch": 4}}))
    (directory / "damaged.yaml").write_bytes(b"\x00\x01: [")
    (directory / "list.yaml").write_text("- small")
    (directory / "latin1").write_bytes("nöde\n".encode("latin-1"))
    (directory / "empty.yaml").write_text("")
    (directory / "refers.yaml").write_text("model: {path: '${nowhere}'}\n")
    os.mkfifo(directory / "pipe")
    broken = directory / "broken"
    for part in ("checkpoints/step-000001", "failed/step-000001", "failed/step-000002", "episodes"):
        (broken / part).mkdir(parents=True)
    (broken / "config.yaml").write_text(yaml.safe_dump(small))
    (broken / "run.json").write_text('{"run_id": ')
    (broken / "checkpoints" / "step-000001" / "state.json").write_text("{}")
    (broken / "failed" / "step-000001" / "update.json").write_text("[")
    (broken / "failed" / "step-000002" / "update.json").write_text("{}")
    shutil.copy(model_dir / "model.safetensors", broken / "failed" / "step-000002" / "batches.safetensors")
    return directory


@pytest.fixture(scope="module")
def taken():
    """Return a port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("kind", "command", "said"), TABLE, ids=[f"{kind}: {command}" for kind, command, _ in TABLE]
)
def test_bad_input_gets_one_clear_line(
    kind, command, said, place, taken, model_dir, request, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    filled = {"port": taken, "model": model_dir, "python": sys.executable}
    if "{locked}" in command:
        filled["locked"] = request.getfixturevalue("locked")
    before = _files(place)
    try:
        code = main(command.format(**filled).split())
    except SystemExit as ended:  # argparse
        code = ended.code
    out, err = capsys.readouterr()
    assert code in (1, 2), err
    assert said.format(**filled) in " ".join(err.split())
    assert kind != "another version" or len(err.strip().splitlines()) == 1
    assert "Traceback" not in out + err
    assert _files(place) == before


def _files(directory):
    """All of them except the lock of a run that was tried."""
    return sorted(path for path in directory.rglob("*") if path.name != ".lock")


def test_every_command_has_its_bad_input():
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    assert len(commands) == len(list(COMMANDS))
    assert {command.split()[0] for _, command, _ in TABLE} == set(commands)


@pytest.mark.parametrize(
    "words", [["--debug", "train", "nowhere.yaml"], ["train", "nowhere.yaml", "--debug"]]
)
def test_with_debug_the_traceback_is_shown(words, caplog):
    caplog.set_level(logging.WARNING, "rl4llm")  # put back afterwards
    with pytest.raises(FileNotFoundError):
        main(words)
    # also of errors that a run survives
    assert logging.getLogger("rl4llm.raised").isEnabledFor(logging.DEBUG)


def test_ctrl_c_ends_a_command_with_one_line_and_130(place, monkeypatch, capsys):
    class Interrupts(BaseRewardFunction):
        def __init__(self, name="interrupts"):
            super().__init__(name)

        def __call__(self, messages, ground_truth, **columns):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            return 0.0

    monkeypatch.setattr(REWARDS, "_items", {**REWARDS._items, "interrupts": Interrupts})
    monkeypatch.chdir(place)
    assert main(["eval", "small.yaml", "rewards=[interrupts]", "eval.limit=1"]) == 130
    out, err = capsys.readouterr()
    assert err.strip().splitlines()[-1] == "Stopped."
    assert "Traceback" not in out + err


EARLY = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *others):
        if name == "rl4llm.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from rl4llm.__main__ import program
program()
"""


@pytest.mark.parametrize(
    ("ignored", "code"), [(False, -signal.SIGINT), (True, 0)], ids=["alone", "in a shell's background"]
)
def test_ctrl_c_during_the_imports_exits_silently_or_is_ignored(ignored, code):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        words = [sys.executable, "-c", EARLY, "info", "--completion", "bash"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    finally:
        if ignored:
            signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_inside_an_import_counts_as_ctrl_c(monkeypatch, capsys):
    class Lazy(ModuleType):
        cause: BaseException

        def __getattr__(self, name):
            raise ModuleNotFoundError("Could not import module") from self.cause

    monkeypatch.setitem(
        sys.modules,
        "rl4llm.extensions.inspect.info.inventory",
        Lazy("rl4llm.extensions.inspect.info.inventory"),
    )
    Lazy.cause = KeyboardInterrupt()
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"
    Lazy.cause = OSError()
    with pytest.raises(ModuleNotFoundError):
        main(["info"])


@pytest.mark.parametrize("words", [["info", "--completion", "bash"], ["train", "--help"]], ids=" ".join)
def test_a_closed_pipe_ends_a_command_silently(words):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {
        **os.environ,
        "PYTHONUNBUFFERED": "",
    }  # as it is by default; a help text is then written at the very end
    command = [sys.executable, "-m", "rl4llm", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=buffered, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_are_no_reason_to_fail():
    command = f"exec {sys.executable} -m rl4llm info --completion bash <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=120).returncode == 0
