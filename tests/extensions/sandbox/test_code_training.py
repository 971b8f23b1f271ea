"""Training on programs: the configuration runs end to end, and what the sandbox saw is stored."""

import json
from pathlib import Path

import attacker
import pytest
from abuse import CHECK
from attacker import HONEST

from rl4llm.cli import main
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.errors import RewardError

CONFIG = Path(__file__).parents[3] / "configs" / "humaneval_grpo.yaml"
REPAIR = CONFIG.with_name("code_repair_grpo.yaml")
SMALL = [
    "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "tracking.tensorboard=false", "checkpoint.every=0",
]  # fmt: skip


@pytest.fixture
def problems(tmp_path):
    """Problems in HumanEval's columns."""
    path = tmp_path / "problems.jsonl"
    rows = [
        {
            "task_id": f"own/{number}",
            "prompt": f'def add{number}(x):\n    """Add {number}, such that add{number}(2) == {number + 2}."""\n',
            "entry_point": f"add{number}",
            "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n    assert candidate(0) == {number}\n",
        }
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model_dir, problems, directory, *overrides):
    paths = [f"model.path={model_dir}", f"data.path={problems}", f"output.dir={directory}"]
    return [str(CONFIG), *SMALL, *paths, *overrides]


@pytest.mark.usefixtures("_bubblewrap")
def test_the_configuration_for_programs_trains_end_to_end(model_dir, problems, tmp_path):
    assert main(["train", *arguments(model_dir, problems, tmp_path / "run")]) == 0
    kept = json.loads((tmp_path / "run" / "sandbox.json").read_text())
    assert kept["level"] == "prefork"
    assert all(kept["properties"].values())
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in metrics if "reward/mean" in row] == [0.0, 0.0]
    episodes = (tmp_path / "run" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    stored = [json.loads(line)["extras"]["tests"]["code"] for line in episodes]
    assert {item["sandbox"] for item in stored} == {"prefork"}
    assert {item["status"] for item in stored} <= {"wrong", "model_error"}


@pytest.mark.usefixtures("_bubblewrap")
def test_code_repair_config_trains(model_dir, problems, tmp_path):
    """The small model says no whole program, but a turn that ends at a frequent letter is one that fails."""
    short = ["rollout.stop=[e,a,t,o]", "rollout.max_tokens=32"]
    assert main(["train", str(REPAIR), *arguments(model_dir, problems, tmp_path / "run", *short)[1:]]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    played = [row for row in metrics if "trajectories" in row]
    assert [row["trajectories"] for row in played] == [4.0, 4.0]
    assert all(row["turns"] > 1 and row["env/runs"] > 1 and row["env/first_try"] == 0 for row in played)
    episodes = (tmp_path / "run" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    said = [message["content"] for line in episodes for message in json.loads(line)["messages"]]
    assert any(text.startswith("Test 1 of 1 failed:\nassert add") for text in said)


def test_weak_level_is_refused_unless_allowed(model_dir, problems, tmp_path):
    given = arguments(model_dir, problems, tmp_path / "run", "sandbox.level=rlimits")
    with pytest.raises(RewardError):
        build_trainer(load_config(given[0], given[1:]))
    config = load_config(given[0], [*given[1:], "sandbox.allow_weak=true"])
    with build_trainer(config) as trainer:
        trainer.train()
    assert json.loads((tmp_path / "run" / "sandbox.json").read_text())["properties"]["network"] is False


@pytest.mark.usefixtures("_bubblewrap")
def test_attacking_policy_earns_nothing_and_training_continues(model_dir, tmp_path, monkeypatch, sweep):
    hacks = attacker.HACKS if sweep else attacker.HACKS[::4]  # test_abuse.py judges each
    monkeypatch.setattr(attacker, "HACKS", hacks)
    path = tmp_path / "problem.jsonl"
    prompt = 'def solve(n):\n    """Solve."""\n'
    row = {"prompt": prompt, "entry_point": "solve", "test": CHECK.tests[0]}
    rows = [{"id": number, **row} for number in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = -(-len(hacks) // 6)
    overrides = [
        "inference.name=attacker:Attacker", "rollout.group_size=4", f"max_steps={steps}", "rollout.max_tokens=600",
    ]  # fmt: skip
    rewards = "rewards=[{name: code, partial: true, wall_s: 1.0, total_s: 2.0}]"
    given = arguments(model_dir, path, tmp_path / "run", *overrides, rewards)
    with build_trainer(load_config(given[0], given[1:])) as trainer:
        trainer.train()
    assert trainer.step == steps
    files = sorted((tmp_path / "run" / "episodes").glob("step-*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    honest = [episode["reward"] for episode in episodes if HONEST in episode["messages"][-1]["content"]]
    scores = {episode["messages"][-1]["content"]: episode["reward"] for episode in episodes}
    assert honest == [1.0] * (2 * steps)
    assert {text: reward for text, reward in scores.items() if reward != 0.0 and HONEST not in text} == {}
    assert len(scores) == len(hacks) + 1
