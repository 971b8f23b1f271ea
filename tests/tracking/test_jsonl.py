import json
import math
import os

import pytest

from rl4llm.core.errors import DataError
from rl4llm.tracking.tracker import JsonlTracker, read_jsonl


def write(path, steps, resume_step=-1):
    tracker = JsonlTracker(path, resume_step)
    for step in steps:
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()


def steps(path):
    return [row["step"] for row in read_jsonl(path)]


def test_a_row_is_there_as_soon_as_it_is_logged(tmp_path):
    tracker = JsonlTracker(tmp_path / "logs" / "metrics.jsonl")
    tracker.log(1, {"loss": 0.25, "count": 3})
    assert read_jsonl(tmp_path / "logs" / "metrics.jsonl") == [{"step": 1, "loss": 0.25, "count": 3.0}]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"loss": math.nan, "kl": math.inf, "lr": 1.0})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "loss": None, "kl": None, "lr": 1.0}]


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "reward', b"\x00\x00\x00", b'{"step": 3}'])
@pytest.mark.parametrize("resume_step", [-1, 0, 3, 5, 9])
def test_a_resumed_log_has_every_step_once(tmp_path, resume_step, torn):
    path = tmp_path / "m.jsonl"
    write(path, range(6))
    with open(path, "ab") as file:
        file.write(torn)
    write(path, range(min(resume_step, 5) + 1, 12), resume_step)
    assert steps(path) == list(range(12))


DAMAGED = {
    "garbage": b"\xff garbage",
    "zeros": b"\x00" * 30,
    "cut": b'{"step": 3, "rewa',
    "two in one": b'{"step": 3, "rewa{"step": 4, "reward/mean": 0.4}',
    "no step": b'{"step": null}',
}


@pytest.mark.parametrize("end", [b"\n", b""], ids=["line", "tail"])
@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_line_is_set_aside_with_a_warning(tmp_path, line, end):
    path, warnings = tmp_path / "m.jsonl", []
    write(path, range(3))
    with open(path, "ab") as file:
        file.write(DAMAGED[line] + end)
        file.write(b'{"step": 5}\n' if end else b"")
    tracker = JsonlTracker(path, 5, warnings.append)
    tracker.log(6, {})
    assert steps(path) == ([0, 1, 2, 5, 6] if end else [0, 1, 2, 6])
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == DAMAGED[line] + b"\n"
    assert len(warnings) == 1
    tracker.close()
    JsonlTracker(path, 6, pytest.fail).close()


def test_torn_line_of_a_step_that_comes_again_is_no_damage(tmp_path):
    write(tmp_path / "m.jsonl", range(3))
    for torn in (b'{"step": 3, "rew', b'{"st', b"\x00"):
        with open(tmp_path / "m.jsonl", "ab") as file:
            file.write(torn)
        JsonlTracker(tmp_path / "m.jsonl", 2, pytest.fail).close()
        assert steps(tmp_path / "m.jsonl") == [0, 1, 2]


@pytest.mark.parametrize(
    ("tail", "damaged", "kept"),
    [
        (b'\xff damaged\n{"step": 5, "eval/reward": 1.0}\n', b"\xff damaged\n", [5, 5, 6]),
        (b'{"step": 5, "eval/rew', b'{"step": 5, "eval/rew\n', [5, 6]),
    ],
    ids=["between", "torn"],
)
def test_damage_at_the_resume_step_keeps_the_rows(tmp_path, tail, damaged, kept):
    path, warnings = tmp_path / "m.jsonl", []
    path.write_bytes(b'{"step": 5, "loss": 1.0}\n' + tail)
    tracker = JsonlTracker(path, 5, warnings.append)
    tracker.log(6, {})
    assert (steps(path), len(warnings)) == (kept, 1)
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == damaged


def test_several_rows_of_one_step_stay_together_over_a_resume(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2, 2, 3])
    write(path, [3], resume_step=2)
    assert steps(path) == [1, 2, 2, 3]


def test_a_reader_skips_a_torn_last_line_and_refuses_others(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert steps(path) == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part(tmp_path, files_of_at_most):
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 1.0})
    with files_of_at_most(os.path.getsize(path) + 10), pytest.raises(OSError):
        tracker.log(2, {"loss": 2.0})
    tracker.log(3, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
