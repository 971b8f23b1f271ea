"""Training on programs: the configuration runs end to end, and what the sandbox saw is stored."""

import json
import shutil
from pathlib import Path

import pytest

from rl4llm.build import build_trainer
from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.core.errors import RewardError

CONFIG = Path(__file__).parents[2] / "configs" / "humaneval_grpo.yaml"
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
            "prompt": f"def add{number}(x):\n    \"\"\"Add {number}.\"\"\"\n",
            "entry_point": f"add{number}",
            "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n    assert candidate(0) == {number}\n",
        }
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model_dir, problems, directory, *overrides):
    return [str(CONFIG), *SMALL, f"model.path={model_dir}", f"data.path={problems}", f"output.dir={directory}", *overrides]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed; scripts/install_sandbox.sh does it")
def test_the_configuration_for_programs_trains_end_to_end(model_dir, problems, tmp_path, capsys):
    assert main(["train", *arguments(model_dir, problems, tmp_path / "run")]) == 0
    assert "sandbox prefork: contains network, host_files" in capsys.readouterr().out
    kept = json.loads((tmp_path / "run" / "sandbox.json").read_text())
    assert kept["level"] == "prefork"
    assert all(kept["properties"].values())
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in metrics if "reward/mean" in row] == [0.0, 0.0]
    episodes = (tmp_path / "run" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    stored = [json.loads(line)["extras"]["tests"]["code"] for line in episodes]
    assert {item["sandbox"] for item in stored} == {"prefork"}
    assert {item["status"] for item in stored} <= {"wrong", "model_error"}


def test_training_refuses_the_weak_level_unless_the_configuration_allows_it(model_dir, problems, tmp_path):
    given = arguments(model_dir, problems, tmp_path / "run", "sandbox.level=rlimits")
    with pytest.raises(RewardError, match=r"rlimits: refused.*sandbox\.allow_weak=true takes it all the same"):
        build_trainer(load_config(given[0], given[1:]))
    config = load_config(given[0], [*given[1:], "sandbox.allow_weak=true"])
    with build_trainer(config) as trainer:
        trainer.train()
    assert json.loads((tmp_path / "run" / "sandbox.json").read_text())["properties"]["network"] is False
