"""The first run: what it teaches, what it holds back, and that it can be stopped anywhere."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from forked_python import python

from rl4llm.core.types import ChatMessage
from rl4llm.data.arithmetic import arithmetic_rows, problems
from rl4llm.envs.tools import calculator
from rl4llm.quickstart.demonstrations import Mix, demonstrations
from rl4llm.rewards import MathReward

ROOT = Path(__file__).parents[1]
SETUP = (ROOT / "setup.py").read_text()


def question(row):
    return row["messages"][1]["content"]


def test_no_held_out_problem_occurs_in_training_or_in_a_demonstration():
    held_out = {problem for problem, _ in itertools.islice(problems("test", 0), 400)}
    for seed in range(3):
        assert held_out.isdisjoint(problem for problem, _ in itertools.islice(problems("train", seed), 5000))
    words = {question(row).split(" ", 1)[1] for row in arithmetic_rows("test", 400)}
    assert words.isdisjoint(question(row).split(" ", 1)[1] for row in demonstrations(0))


def test_the_answer_is_what_the_calculator_says_step_by_step():
    for problem, _ in itertools.islice(problems("train", 0), 500):
        for expression, result in problem.steps:
            assert calculator(expression) == str(result)


def test_clean_demonstrations_earn_the_reward_and_sloppy_ones_mostly_do_not():
    mix = Mix(clean=200, sloppy=200)
    reward = MathReward(extract="answer")
    scores = []
    for row in demonstrations(0, mix):
        messages = [ChatMessage.from_dict(message) for message in row["messages"]]
        scores.append(reward(messages, row["ground_truth"]))
    reward.close()
    assert sum(scores[:200]) == 200
    assert 0.1 < sum(scores[200:]) / 200 < 0.6


def test_the_calculator_computes_and_refuses_everything_else():
    assert calculator("(37+48)*3") == "255"
    assert calculator("-2.5*4") == "-10"
    assert calculator("1/3") == "0.3333333333"
    for wrong in ("2**99999", "__import__('os')", "1/0", "", "9" * 300, "(" * 150, "True+1", "1;2", "a"):
        with pytest.raises(ValueError):
            calculator(wrong)


@pytest.fixture
def small_configs(tmp_path):
    """The quickstart's configurations with a few steps each."""
    directory = tmp_path / "configs"
    shutil.copytree(ROOT / "configs", directory)
    for name, changes in {
        "quickstart_warmup.yaml": {"max_steps": 6, "rollout": {"prompts": 4}, "checkpoint": {"every": 2}},
        "quickstart.yaml": {
            "max_steps": 3,
            "eval": {"limit": 4, "every": 3},
            "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 8},
            "checkpoint": {"every": 1},
        },
    }.items():
        path = directory / name
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return directory


def command(tmp_path, configs):
    return ["-m", "rl4llm", "quickstart", "--dir", str(tmp_path / "run"), "--configs", str(configs)]


def test_the_quickstart_runs_to_its_table_and_its_picture(tmp_path, small_configs):
    done = python(*command(tmp_path, small_configs))
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("held-out success", "learning_curve.png", "tensorboard", "metrics.jsonl", "episodes"):
        assert text in done.stdout
    run = tmp_path / "run" / "grpo"
    assert f"rl4llm view {run}" in done.stdout
    assert "it/s" not in done.stdout + done.stderr  # no progress bars of libraries
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["step"] for line in (run / "eval.jsonl").read_text().splitlines()] == [0, 3]
    again = python(*command(tmp_path, small_configs))
    assert again.returncode == 0
    assert "after step 3" in again.stdout


ELSEWHERE = ("replay", "launch", "serve-env")  # need a step that went wrong, GPUs, or somebody who ends them


def test_the_commands_of_the_readme_run_behind_the_quickstart(tmp_path, small_configs):
    """Each as it stands there, but that a model which learned nothing has no good episodes, and that `view` has an end."""
    block = next(text for text in (ROOT / "README.md").read_text().split("```") if "rl4llm check" in text)
    lines = [line.partition("#")[0].split()[1:] for line in block.splitlines() if line.startswith("rl4llm")]
    assert {line[0] for line in lines} >= {"plan", "check", "train", "eval", "collect", "sft", "export", "view", "info"}
    quickstart = ["quickstart", "--configs", str(small_configs)]
    for words in [quickstart, *(line for line in lines if line[0] not in ELSEWHERE)]:
        words = [word if before != "--filter-reward" else "0" for before, word in itertools.pairwise(["", *words])]
        done = python("-m", "rl4llm", *words, *(["--json"] if words[0] == "view" else []), cwd=tmp_path)
        assert done.returncode == 0, [words, done.stdout, done.stderr]
        assert "[transformers]" not in done.stdout + done.stderr, [words, done.stderr]  # no warnings of libraries
    assert (tmp_path / "models" / "calculator" / "model.safetensors").exists()


def test_ctrl_c_stops_the_quickstart_and_says_how_to_go_on(tmp_path, small_configs):
    words = [sys.executable, *command(tmp_path, small_configs)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "run" / "warmup" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while child.poll() is None and not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 75, output
    assert "The same command goes on" in output
    assert "Traceback" not in output
    done = python(*command(tmp_path, small_configs))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed" in done.stdout


def test_the_tokenizer_loads_as_it_was_saved(tokenizer, tmp_path):
    from rl4llm.backends.models import load_tokenizer
    from rl4llm.quickstart.model import build_model, save_model

    save_model(build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, tmp_path)
    text = 'Ann has 37 coins: {"expression": "37+48"} 1332'
    assert load_tokenizer(tmp_path)(text).input_ids == tokenizer(text).input_ids
    config = json.loads((tmp_path / "config.json").read_text())  # transformers cuts text otherwise beside a Qwen2 model
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    assert load_tokenizer(tmp_path)(text).input_ids == tokenizer(text).input_ids


def test_the_script_hands_its_options_to_the_command_and_to_nothing_else(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    command = tmp_path / "bin" / "rl4llm"
    command.write_text('#!/bin/sh\necho "got: $*"\n')
    command.chmod(0o755)
    checksum = subprocess.run(["cksum"], input=SETUP, capture_output=True, text=True, check=True).stdout
    (tmp_path / "rl4llm-installed").write_text(f" {checksum}")  # so that there is nothing to install
    for options in ([], ["--seed", "7", "--dir", "a b"]):
        script = ["scripts/quickstart.sh", *options]
        environment = {**os.environ, "RL4LLM_VENV": str(tmp_path), "RL4LLM_PYTHON": sys.executable}
        done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == " ".join(["got: quickstart", *options]) + "\n", done.stderr
