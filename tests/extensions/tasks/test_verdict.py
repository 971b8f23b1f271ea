"""What tests write is read as it is meant, and what cannot be read is a fault of the data, never a score."""

import json

import pytest

from rl4llm.core.base_reward import as_sample
from rl4llm.core.errors import DataError
from rl4llm.extensions.tasks.reward import TaskReward
from rl4llm.extensions.tasks.verdict import read_verdict
from rl4llm.rewards.pool import RewardFailure

CTRF = json.dumps({"results": {"tests": [
    {"name": "a", "status": "passed"},
    {"name": "b", "status": "failed"},
    {"name": "c", "status": "skipped"},
    {"name": "d", "status": "other"},
]}}).encode()  # fmt: skip
JUNIT = b"""<testsuites><testsuite>
<testcase classname="t.C" name="a"/>
<testcase classname="t.C" name="b"><failure/></testcase>
<testcase classname="t" name="c"><error/></testcase>
<testcase classname="t" name="c"/>
<testcase classname="t" name="d"><skipped/></testcase>
<testcase classname="t" name="e"><system-out>said</system-out></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    "files, code, reward",
    [
        ({"reward.txt": b"0.25\n"}, 1, 0.25),
        ({"reward.txt": b".5"}, 0, 0.5),
        ({"reward.txt": b"0", "reward.json": b"1"}, 1, 1.0),
        ({"reward.json": b'{"reward": 0.5, "speed": 1}'}, 0, 0.5),
        ({"reward.json": b'{"style": 0.5, "speed": 1}'}, 0, 0.75),
        ({"reward.txt": b"1", "ctrf.json": CTRF}, 0, 1.0),
        ({"reward.txt": b"0", "ctrf.json": b"{"}, 0, 0.0),
        ({"ctrf.json": CTRF}, 0, 1 / 3),
        ({"junit.xml": JUNIT}, 1, 2 / 4),
        ({}, 0, 1.0),
        ({}, 3, 0.0),
        ({}, None, 0.0),
    ],
)
def test_a_reward_counts_before_a_report_and_the_exit_code(files, code, reward):
    assert read_verdict(files, code, "pytest").reward == pytest.approx(reward)


def test_reports_name_each_test():
    assert read_verdict({"ctrf.json": CTRF}, 0, "").tests == {"a": True, "b": False, "d": False}
    assert read_verdict({"junit.xml": JUNIT}, 0, "").tests == {
        "t.C.a": True,
        "t.C.b": False,
        "t.c": False,
        "t.e": True,
    }


@pytest.mark.parametrize(
    "files",
    [
        {"reward.txt": b"nan"},
        {"reward.txt": b"1.5"},
        {"reward.txt": b"-0.1"},
        {"reward.txt": b""},
        {"reward.txt": b"passed"},
        {"reward.txt": b"\xff"},
        {"reward.json": b"NaN"},
        {"reward.json": b"{}"},
        {"reward.json": b'{"a": "1"}'},
        {"reward.json": b'{"a": NaN}'},
        {"reward.json": b'{"a": 1e999}'},
        {"reward.json": b"[1]"},
        {"reward.json": b'{"a": 1'},
        {"reward.json": b"[" * 10**5},
        {"ctrf.json": b"{}"},
        {"ctrf.json": b'{"results": {"tests": [1]}}'},
        {"junit.xml": b"<testsuite>"},
        {"junit.xml": b"<testsuite><testcase/></testsuite>"},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_a_fault_of_the_data(files):
    with pytest.raises(DataError):
        read_verdict(files, 0, "")


def test_a_promised_reward_that_is_missing_is_no_success():
    with pytest.raises(DataError):  # a disk that the episode filled
        read_verdict({}, 0, "pytest; echo $? > /logs/verifier/reward.txt")


def test_a_sample_without_a_verdict_fails():
    graded, ungraded = (as_sample([], "name", {"task": "/tasks/a"}) for _ in range(2))
    graded.extras["task"] = {"reward": 0.0, "tests": {}, "output": ""}
    zero, failure = TaskReward().score_batch([graded, ungraded])
    assert zero == 0.0 and isinstance(failure, RewardFailure)
    with pytest.raises(DataError):
        TaskReward().check_row("name", {})
