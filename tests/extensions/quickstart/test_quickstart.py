"""The first run: what it teaches, what it holds back, and that it can be stopped anywhere."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from forked_python import python, started

from rl4llm.core.types import ChatMessage
from rl4llm.envs.tools import ToolError, calculator
from rl4llm.extensions.quickstart.arithmetic import DEFAULT_LIMIT, SIZE, arithmetic_rows, problems
from rl4llm.extensions.quickstart.demonstrations import Mix, demonstrations
from rl4llm.rewards import MathReward

ROOT = Path(__file__).parents[3]
INSTALLED = "".join(
    path.read_text()
    for path in [
        ROOT / "setup.py",
        *sorted(ROOT.glob("extras/*/pyproject.toml")),
        *sorted(ROOT.glob("scripts/lock/*.txt")),
    ]
)


def question(row):
    return row["messages"][1]["content"]


def test_held_out_problems_occur_in_no_demonstration():
    held_out = {problem for problem, _ in itertools.islice(problems("test", 0), 400)}
    for seed in range(3):
        assert held_out.isdisjoint(problem for problem, _ in itertools.islice(problems("train", seed), 5000))
    words = {question(row).split(" ", 1)[1] for row in arithmetic_rows("test", 400)}
    assert words.isdisjoint(question(row).split(" ", 1)[1] for row in demonstrations(0))


def test_as_many_problems_as_the_limit_says_or_as_there_are():
    assert [len(arithmetic_rows("train", limit)) for limit in (1, None)] == [1, DEFAULT_LIMIT]
    assert len(arithmetic_rows("test", SIZE + 1)) == SIZE


def test_the_answer_is_what_the_calculator_says_step_by_step():
    for problem, _ in itertools.islice(problems("train", 0), 500):
        for expression, result in problem.steps:
            assert calculator(expression) == str(result)


def test_clean_demonstrations_earn_rewards_and_sloppy_ones_not():
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
        with pytest.raises(ToolError):
            calculator(wrong)


@dataclass(frozen=True, slots=True)
class Quickstart:
    """What the quickstart printed with a few steps: stopped by Ctrl-C, started again, and once more when it was done."""

    directory: Path
    stopped: subprocess.CompletedProcess
    done: subprocess.CompletedProcess
    again: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(ROOT / "configs", directory / "configs")
    for name, changes in {
        "quickstart_warmup.yaml": {"max_steps": 6, "rollout": {"prompts": 4}, "checkpoint": {"every": 2}},
        "quickstart.yaml": {
            "max_steps": 3,
            "eval": {"limit": 4, "every": 3},
            "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 8},
            "checkpoint": {"every": 1},
        },
        "sft.yaml": {"rollout": {"prompts": 4}},
    }.items():
        path = directory / "configs" / name
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    command = ["-m", "rl4llm", "recipe", "quickstart", "--configs", "configs"]
    return Quickstart(
        directory,
        stopped(command, directory),
        python(*command, cwd=directory),
        python(*command, cwd=directory),
    )


def stopped(command, directory):
    """Send Ctrl-C once the first step is logged."""
    log = directory / "runs" / "quickstart" / "warmup" / "metrics.jsonl"
    with started(*command, cwd=directory) as program:
        while program.process.is_alive() and not (log.exists() and log.read_text()):
            time.sleep(0.01)
        os.kill(program.process.pid, signal.SIGINT)
        return program.end(120)


def test_ctrl_c_stops_the_quickstart_and_it_resumes(quickstart):
    assert quickstart.stopped.returncode == 75, quickstart.stopped
    assert (quickstart.done.returncode, quickstart.again.returncode) == (0, 0), quickstart.done
    assert "resumed" in quickstart.done.stdout


def test_the_quickstart_ends_with_a_table_and_a_picture(quickstart):
    printed = f"{quickstart.done}"
    assert "held-out success" in printed and "rl4llm view runs/quickstart/grpo" in printed
    assert "it/s" not in printed  # no progress bars of libraries
    run = quickstart.directory / "runs" / "quickstart" / "grpo"
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["step"] for line in (run / "eval.jsonl").read_text().splitlines()] == [0, 3]


@pytest.mark.sweep  # asynchronous runs have their own tests; this one adds the server that the recipe starts
def test_an_asynchronous_quickstart_samples_while_it_trains(quickstart):
    command = ["-m", "rl4llm", "recipe", "quickstart", "--async", "--configs", "configs"]
    done = python(*command, cwd=quickstart.directory)
    assert done.returncode == 0, done
    file = quickstart.directory / "runs" / "quickstart" / "async" / "metrics.jsonl"
    ages = [row["staleness"] for row in map(json.loads, file.read_text().splitlines()) if "staleness" in row]
    assert ages[0] == 0 and max(ages) > 0


def test_the_commands_of_the_readme_run_after_the_quickstart(quickstart):
    """Run each unchanged, except that a model which learned nothing has no good episodes, and that `view` must end."""
    block = next(text for text in (ROOT / "README.md").read_text().split("```") if "rl4llm check" in text)
    lines = [line.partition("#")[0].split()[1:] for line in block.splitlines() if line.startswith("rl4llm")]
    names = {"plan", "check", "train", "eval", "collect", "export", "view", "info"}
    assert {line[0] for line in lines} >= names
    for line in lines:
        words = [
            word if before != "--filter-reward" else "0" for before, word in itertools.pairwise(["", *line])
        ]
        words += ["--json"] if words[0] == "view" else []
        done = python("-m", "rl4llm", *words, cwd=quickstart.directory)
        assert done.returncode == 0, done
        assert "[transformers]" not in f"{done}", done  # no warnings of libraries
    assert (quickstart.directory / "models" / "calculator" / "model.safetensors").exists()


def test_the_tokenizer_loads_as_it_was_saved(tokenizer, tmp_path):
    from rl4llm.backends.models import load_tokenizer
    from rl4llm.backends.tiny import build_model, save_model

    save_model(build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, tmp_path)
    text = 'Ann has 37 coins: {"expression": "37+48"} 1332'
    assert load_tokenizer(tmp_path)(text).input_ids == tokenizer(text).input_ids
    # transformers cuts text otherwise beside a Qwen2 model
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    assert load_tokenizer(tmp_path)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize(("installed", "options", "command"), [
    ("", [], "quickstart"),
    ("", ["--seed", "7", "--dir", "a b"], "quickstart --seed 7 --dir a b"),
    ("real", ["--real", "--seed", "7"], "run sums --seed 7"),
    ("", ["--seed", "7", "--real"], None),  # installs what the real model needs; what stands in for pip fails
])  # fmt: skip
def test_quickstart_script_passes_its_options_to_the_command(installed, options, command, tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in {"rl4llm": 'echo "got: $*"', "python": "exit 1", "pip": "exit 1"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    checksum = subprocess.run(["cksum"], input=INSTALLED, capture_output=True, text=True, check=True).stdout
    (tmp_path / "rl4llm-installed").write_text(f"{installed} {checksum}")
    environ = {**os.environ, "RL4LLM_VENV": str(tmp_path), "RL4LLM_PYTHON": sys.executable}
    script = ["scripts/quickstart.sh", *options]
    done = subprocess.run(script, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    if command:
        assert done.stdout == f"got: recipe {command}\n", done
    else:
        assert done.returncode == 1 and "Installing rl4llm with real into" in done.stdout
