"""Every example runs, and learns what it says."""

import json
import shutil
from pathlib import Path

import pytest
from forked_python import python

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNNABLE = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "shared.py")


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_example_runs_and_its_reward_rises(name, tmp_path):
    if name == "code_repair.py" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")
    output = tmp_path / "run"
    done = python(EXAMPLES / name, "--steps", "20", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward" in done.stdout.splitlines()[-1]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4


def test_there_is_an_example_for_each_thing_that_users_write():
    assert RUNNABLE == [
        "agent.py",
        "code_repair.py",
        "custom_env.py",
        "custom_loop.py",
        "custom_reward.py",
        "custom_tool.py",
        "from_trl.py",
        "new_algorithm.py",
        "self_play.py",
    ]
