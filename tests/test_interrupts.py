"""Ctrl-C, closed pipes and closed streams end a command silently, with the exit code that shells expect."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from rl4llm.cli import main
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.rewards import REWARDS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "words", [["--debug", "train", "nowhere.yaml"], ["train", "nowhere.yaml", "--debug"]]
)
def test_with_debug_the_traceback_is_shown(words, caplog):
    caplog.set_level(logging.WARNING, "rl4llm")  # put back afterwards
    with pytest.raises(FileNotFoundError):
        main(words)
    # also of errors that a run survives
    assert logging.getLogger("rl4llm.raised").isEnabledFor(logging.DEBUG)


def test_ctrl_c_ends_a_command_with_one_line_and_130(model_dir, tmp_path, monkeypatch, capsys):
    class Interrupts(BaseRewardFunction):
        def __init__(self, name="interrupts"):
            super().__init__(name)

        def __call__(self, messages, ground_truth, **columns):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            return 0.0

    monkeypatch.setattr(REWARDS, "_items", {**REWARDS._items, "interrupts": Interrupts})
    words = [f"model.path={model_dir}", f"output.dir={tmp_path}", "rewards=[interrupts]", "eval.limit=1"]
    assert main(["eval", "configs/quickstart.yaml", *words, "rollout.max_tokens=2"]) == 130
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
