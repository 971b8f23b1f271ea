"""The quickstart with the real pretrained model: two steps, stopped by Ctrl-C after the first, and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from downloads import smollm2
from forked_python import python

from rl4llm.config import CONFIGS
from rl4llm.extensions.quickstart.real import CONFIG
from rl4llm.extensions.quickstart.sums import HELD_OUT, sums

STEPS, PROBLEMS = 4, 6
SHORT = {
    "max_steps": STEPS,
    "eval": {"split": "test", "every": STEPS, "limit": PROBLEMS},
    "rollout": {"prompts": 1, "group_size": 2, "max_tokens": 12},
}


@dataclass(frozen=True, slots=True)
class Real:
    """The directory of a run, and what each start of the same command printed."""

    directory: Path
    stopped: subprocess.CompletedProcess
    done: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    model, directory = smollm2(), tmp_path_factory.mktemp("real")
    short = directory / "configs" / CONFIG
    short.parent.mkdir(parents=True)
    short.write_text(yaml.safe_dump(yaml.safe_load((CONFIGS / CONFIG).read_text()) | SHORT))
    command = ["-m", "rl4llm", "quickstart", "--real", "--model", str(model), "--configs", "configs"]
    return Real(directory, stopped(command, directory), python(*command, cwd=directory, timeout=600))


def stopped(command, directory):
    """Send Ctrl-C once the first step is logged."""
    child = subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = directory / "runs" / "real" / "grpo" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while child.poll() is None and time.monotonic() < deadline:
        if log.exists() and '"step": 1' in log.read_text():
            break
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=600)
    return subprocess.CompletedProcess(command, child.returncode, output)


def test_the_same_command_resumes_after_ctrl_c(real):
    assert real.stopped.returncode == 75, real.stopped.stdout
    assert "Stopped and saved. The same command resumes." in real.stopped.stdout
    assert real.done.returncode == 0, real.done.stdout + real.done.stderr
    assert "resumed" in real.done.stdout
    rows = map(json.loads, (real.directory / "runs/real/grpo/metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "reward/mean" in row] == list(range(1, STEPS + 1))


def test_it_ends_with_five_answers_before_and_after_training(real):
    questions = {row["question"]: row["answer"] for row in sums()[:HELD_OUT]}
    rows = [re.split(r" *[│┃] *", line)[1:-1] for line in real.done.stdout.splitlines() if " = ?" in line]
    assert len({question for question, *_ in rows}) == len(rows) == 5
    for question, before, was, after, now in rows:
        for said, verdict in ((before, was), (after, now)):
            assert verdict in ("right", "wrong")
            if verdict == "right":
                assert questions[question] in said
    assert f"after {STEPS} steps" in real.done.stdout


def test_it_prints_the_held_out_share_and_the_next_commands(real):
    share = rf"\d+ of {PROBLEMS} \(\d+\.\d%\)"
    said = rf"greedily: {share} before training, {share} after {STEPS} steps\."
    assert re.search(said, real.done.stdout), real.done.stdout
    for next_command in ("rl4llm view runs/real/grpo", "rl4llm export runs/real/grpo --out models/sums"):
        assert next_command in real.done.stdout
    words = re.search(r"rl4llm (eval runs/real/grpo/config.yaml)", real.done.stdout)[1].split()
    done = python("-m", "rl4llm", *words, "--json", cwd=real.directory)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == STEPS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nowhere"], "--model requires --real"),
        (["--real", "--model", "nowhere"], "--model nowhere is not a directory"),
        (["--real", "--model", "."], "has no config.json"),
        (["--real", "--dir", "/dev/null/x"], "Not a directory"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tmp_path, words, said):
    done = python("-m", "rl4llm", "quickstart", *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
