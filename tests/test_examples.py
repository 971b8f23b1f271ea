"""Every example runs, and learns what it says; those that take long only in a sweep, as tests/trainers learns them too."""

import json
import shutil
from pathlib import Path

import pytest
from forked_python import python

from rl4llm.extensions.tasks.check import try_tasks
from rl4llm.extensions.tasks.rows import task_rows

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPS = (
    "loop.py",
    "loop_async.py",
    "loop_sglang.py",
)  # no runs with logs; tests/trainers/test_loop.py and test_sglang.py have them
OF_EXTRAS = ("from_trl.py", "tinker_loop.py")  # tested there
PARTS = ("shared.py", "sums.py")  # not programs that train
RUNNABLE = sorted(
    path.name for path in EXAMPLES.glob("*.py") if path.name not in (*PARTS, *LOOPS, *OF_EXTRAS)
)


LEARNS_SOON = ("new_algorithm.py",)


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_example_runs_and_its_reward_rises(name, tmp_path, sweep):
    steps = 20 if sweep or name in LEARNS_SOON else 1
    if name == "code_repair.py" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")
    output = tmp_path / "run"
    done = python(EXAMPLES / name, "--steps", str(steps), "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward" in done.stdout.splitlines()[-1]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == steps
    assert steps == 1 or sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4


def test_the_loop_runs_as_a_program():
    done = python(EXAMPLES / "loop.py", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[-2:]] == ["step 1", "step 2"]


def test_there_is_an_example_for_each_thing_that_users_write():
    assert RUNNABLE == [
        "agent.py",
        "code_repair.py",
        "custom_env.py",
        "custom_loop.py",
        "custom_reward.py",
        "custom_tool.py",
        "new_algorithm.py",
        "self_play.py",
    ]


def test_sums_are_right_and_held_out_ones_are_never_trained_on(tmp_path):
    assert python(EXAMPLES / "sums.py", tmp_path).returncode == 0
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )
    assert (len(train), len(held_out)) == (482, 128)
    assert len({row["question"] for row in train + held_out}) == 610
    for row in train + held_out:
        assert str(eval(row["question"].removesuffix(" = ?"))) == row["answer"]


TASKS = sorted(path.parent for path in (EXAMPLES / "tasks").glob("*/task.toml"))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (scripts/install_sandbox.sh)")
def test_example_tasks_are_solved_by_their_solutions_alone(sweep):
    rows = [row for path in (TASKS if sweep else TASKS[::5]) for _, row in task_rows(path)]
    assert len(TASKS) == 20 and try_tasks(rows, {"image": "host", "count": 4}, print) == []
