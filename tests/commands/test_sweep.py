"""A sweep: a run for each combination of values, each in a separate process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from small_run import SmallRun

from rl4llm.cli import build_parser
from rl4llm.commands.sweep import planned
from rl4llm.core.errors import ConfigError


@pytest.fixture
def small(tmp_path, model_dir):
    return SmallRun.at(tmp_path, model_dir)


def started(words):
    return subprocess.Popen(
        [sys.executable, "-m", "rl4llm", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def swept(words):
    process = started(words)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def test_points_are_all_combinations_in_the_given_order(small):
    config, where = small.into("sweep")
    options = ["training.lr=1e-4,1e-3", "rollout.stop=[a,b],[]", "max_steps=7"]
    fixed, runs = planned(config, [where], options)
    assert fixed == [where, "max_steps=7"]
    assert [list(point.values()) for point, _, _ in runs] == [
        ["1e-4", "[a,b]"], ["1e-4", "[]"], ["1e-3", "[a,b]"], ["1e-3", "[]"],
    ]  # fmt: skip
    names = [run.path.relative_to(small.directory / "sweep") for _, run, _ in runs]
    assert len({*names}) == 4 and all(len(name.parts) == 1 for name in names)
    assert str(names[3]) == "training.lr=1e-3,rollout.stop=%5B%5D"


@pytest.mark.parametrize(
    "options",
    [["training.lr=1e-4"], ["training.rate=1,2"], ["training.lr=1e-4,fast"]],
    ids=["one", "key", "value"],
)
def test_a_point_that_cannot_run_is_refused_before_any_starts(options, small):
    with pytest.raises(ConfigError):
        planned(*(small.into("sweep")[0], small.into("sweep")[1:]), options)
    assert not (small.directory / "sweep").exists()


@pytest.mark.parametrize(
    ("options", "override"),
    [(["training.lr=1,2", "training.lr=3,4"], []), (["training.lr=1,2"], ["training.lr=3"])],
    ids=["options", "override"],
)
def test_a_key_comes_once_in_a_sweep(options, override, small):
    config, where = small.into("sweep")
    with pytest.raises(ConfigError):
        planned(config, [where, *override], options)


def test_options_of_a_sweep_add_up():
    words = ["train", "a.yaml", "--sweep", "training.lr=1,2", "seed=1", "--sweep", "max_steps=3,4"]
    assert build_parser("train").parse_args(words).sweep == ["training.lr=1,2", "seed=1", "max_steps=3,4"]


def test_a_sweep_is_not_hidden_inside_a_run(small):
    (small.directory / "sweep").mkdir()
    (small.directory / "sweep" / "run.json").write_text("{}")
    with pytest.raises(ConfigError):
        planned(*(small.into("sweep")[0], small.into("sweep")[1:]), ["training.lr=1e-4,1e-3"])


def test_a_failed_point_ends_no_other_and_done_ones_are_left_out(small, model_dir):
    words = ["train", *small.into("sweep"), "--sweep", f"model.path=missing,{model_dir}", "max_steps=1"]
    code, output = swept(words)
    assert code == 1 and "failed (1)" in output
    (done,) = (small.directory / "sweep").glob("*/model")
    before = os.stat(done.parent / "config.yaml").st_mtime_ns
    code, output = swept(words)
    assert code == 1 and "done before" in output
    assert os.stat(done.parent / "config.yaml").st_mtime_ns == before  # no process began
    config, overrides = words[1], words[2:3]
    (_, more), (_, same) = (
        [is_done for _, _, is_done in planned(config, overrides, [words[4], f"max_steps={steps}"])[1]]
        for steps in (2, 1)
    )
    assert same and not more


def test_ctrl_c_stops_a_sweep_and_the_same_command_resumes(small):
    words = ["train", *small.into("sweep"), "--sweep", "training.lr=1e-3,1e-4", "checkpoint.every=0"]
    process = started([*words, "max_steps=100000"])
    deadline = time.monotonic() + 200
    while small.steps("sweep/training.lr=1e-3") < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "not started" in output and not (small.directory / "sweep" / "training.lr=1e-4").exists()
    step = small.steps("sweep/training.lr=1e-3")
    code, output = swept([*words, f"max_steps={step + 1}"])
    assert code == 0, output
    for name in ("sweep/training.lr=1e-3", "sweep/training.lr=1e-4"):
        rows = (small.directory / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, step + 2))


def test_a_run_that_was_stopped_while_it_started_did_not_fail(small):
    process = started(["train", *small.into("sweep"), "--sweep", "training.lr=1e-3,1e-4"])
    assert any("Run 1 of 2" in line for line in process.stdout)
    time.sleep(0.5)  # in the imports, long before a step
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75 and "stopped" in output and "failed" not in output, output
