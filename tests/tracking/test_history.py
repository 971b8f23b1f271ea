"""The metrics of a run as a table."""

import math

import pytest

from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.history import MetricsTable
from rl4llm.tracking.tracker import JsonlTracker, rounded


def history(directory, steps):
    run = RunDir(directory)
    tracker = JsonlTracker(run.metrics_file)
    tracker.log(0, {"eval/accuracy": 0.25, "eval/turns": 2.0})
    for step in range(1, steps + 1):
        tracker.log(step, {"reward/mean": step / 8, "kl": math.nan, "tokens/s": 14730.2, "mine/own": 1.0})
    tracker.log(steps, {"eval/accuracy": 0.5})
    tracker.close()
    return MetricsTable.of(run)


def test_a_step_and_its_evaluation_are_one_row(tmp_path):
    table = history(tmp_path / "run", 2)
    last = {
        "step": 2,
        "reward/mean": 0.25,
        "kl": None,
        "tokens/s": 14730.2,
        "mine/own": 1.0,
        "eval/accuracy": 0.5,
    }
    assert [row["step"] for row in table] == [0, 1, 2] and table[-1] == last
    lines = [line.split() for line in repr(table).splitlines()]
    assert lines[:4] == [
        ["step", "reward/mean", "eval/accuracy", "tokens/s"], ["0", "0.25"], ["1", "0.125", "14730"],
        ["2", "0.25", "0.5", "14730"],
    ]  # fmt: skip
    assert "3 rows, 6 metrics" in repr(table)


@pytest.mark.parametrize(("value", "shown"), [
    (0.123456, "0.1235"), (9999.7, "10000"), (-12345678.9, "-12345679"), (999.96, "1000"), (1e-7, "1e-07"), (1e20, "1e+20"),
    (math.nan, "nan"), (math.inf, "inf"),
])  # fmt: skip
def test_number_is_rounded_behind_its_point_alone(value, shown):
    assert rounded(value) == shown


def test_a_long_history_shows_its_ends(tmp_path):
    table = history(tmp_path / "run", 5000)
    shown = [line.split()[0] for line in repr(table).splitlines()]
    assert shown == ["step", "0", "1", "2", "...", "4996", "4997", "4998", "4999", "5000", "5001"]
    assert len(table) == 5001 and len(table._repr_html_()) < 2000


def test_a_run_that_has_not_started_has_an_empty_history(tmp_path):
    assert history_of_nothing(tmp_path) == [] and "0 rows, 0 metrics" in repr(history_of_nothing(tmp_path))


def history_of_nothing(directory):
    return MetricsTable.of(RunDir(directory / "none"))
