import json
import os
from dataclasses import replace

import pytest

from rl4llm.core.types import ChatMessage, Completion, Group, TokenSpan, Trajectory
from rl4llm.extensions.view.run import find_runs
from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.run import RunTracker
from rl4llm.tracking.tracker import read_jsonl


def group(reward):
    spans = (TokenSpan.context([1, 2]), *TokenSpan.policy(Completion("a", (5, 6), (-0.1, -0.2), "stop", 1)))
    return Group(
        "p",
        (
            Trajectory(
                "p",
                spans,
                (ChatMessage("user", "?"),),
                {"right": reward},
                reward,
                "done",
                successes={"right": reward >= 1},
            ),
        ),
    )


def pair(*rewards):
    members = tuple(member for reward in rewards for member in group(reward).trajectories)
    return Group("p", members)


def open_run(path, total_steps=4):
    return RunTracker(RunDir.open(path, {"seed": 1}), total_steps=total_steps)


def report(tracker, step):
    with tracker.clock("step"), tracker.clock("rollout"):
        pass
    updates = [
        {"loss": 1.0, "ratio/max": 2.0, "update/tokens": 3.0},
        {"loss": 3.0, "ratio/max": 1.0, "update/tokens": 4.0},
    ]
    tracker.step(step, [group(1.0)], [], updates, tokens=2)
    tracker.evaluation(step, [group(step / 10)], [])


def steps(path, name):
    return [row["step"] for row in read_jsonl(path / "metrics.jsonl") if name in row]


def test_a_resumed_run_has_every_row_once_in_all_logs(tmp_path):
    first = open_run(tmp_path)
    first.begin(-1)
    for step in (1, 2, 3):
        report(first, step)
    first.close()
    second = open_run(tmp_path)
    second.begin(1)
    for step in (2, 3, 4):
        report(second, step)
    second.close()
    assert steps(tmp_path, "loss") == steps(tmp_path, "eval/accuracy") == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(tmp_path / "eval.jsonl")] == [1, 2, 3, 4]
    episodes = [f"{kind}-00000{step}.jsonl" for kind in ("eval", "step") for step in (1, 2, 3, 4)]
    assert sorted(os.listdir(tmp_path / "episodes")) == episodes
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000


@pytest.mark.parametrize("notes", [[{"math": "no_answer"}] * 2, [{"math": "no_answer"}, {}]])
def test_a_first_step_without_a_readable_answer_is_reported(tmp_path, capsys, notes):
    said = (ChatMessage("user", "2+2?"), ChatMessage("assistant", "about four"))
    members = [
        replace(group(0.0).trajectories[0], messages=said, extras={"reward_notes": note}) for note in notes
    ]
    tracker = open_run(tmp_path)
    tracker.begin(-1)
    for step in (1, 2):
        tracker.step(step, [Group("p", tuple(members))], [], [], tokens=2)
    tracker.close()
    printed = capsys.readouterr()
    found = " ".join((printed.out + printed.err).split())
    warned = "no answer in any of the 2 episodes of step 1, such as 'about four'. Next:"
    assert found.count(warned) == int(all(notes))


def test_optimizer_steps_become_one_row_of_sums_maxima_and_means(tmp_path):
    tracker = open_run(tmp_path)
    tracker.begin(-1)
    report(tracker, 1)
    tracker.close()
    row = read_jsonl(tmp_path / "metrics.jsonl")[0]
    assert (row["loss"], row["ratio/max"], row["update/tokens"]) == (2.0, 2.0, 7.0)
    assert row["reward/mean"] == 1.0
    assert {
        "time/step",
        "time/rollout",
        "memory/step",
        "memory/rollout",
        "tokens/s",
        "resources/rss_gb",
    } <= row.keys()


# TensorBoard's writer also says it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_training_continues_when_logs_cannot_be_written(tmp_path, capsys, files_of_at_most):
    tracker = open_run(tmp_path)
    with files_of_at_most(0):
        tracker.begin(-1)
        for step in (1, 2):
            report(tracker, step)
    report(tracker, 3)
    tracker.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]
    assert len(warnings) == len(set(warnings)) and any("metrics.jsonl" in line for line in warnings)
    assert steps(tmp_path, "loss") == [3]


def test_alerts_are_recorded_once_even_after_a_resume(tmp_path):
    first = open_run(tmp_path, total_steps=12)
    first.begin(-1)
    for step in range(1, 6):
        first.step(step, [pair(1.0, 1.0)] * 16, [], [{"grad_norm": 1.0}], tokens=2)
    first.close()
    again = open_run(tmp_path, total_steps=12)
    again.begin(4)  # killed in step 5, whose checkpoint is of step 4: the alert of step 4 stays
    for step in range(5, 10):
        again.step(step, [pair(1.0, 0.0)] * 16, [], [{"grad_norm": 1.0}], tokens=2)
    again.close()
    (viewed,) = find_runs([str(tmp_path)])
    (alert,) = [alert for alert in viewed.about()["alerts"] if alert["name"] == "constant reward"]
    assert (alert["since"], alert["until"]) == (1, 4) and "rollout.group_size" in alert["look_at"]


def test_closing_frees_the_directory_even_if_the_logs_are_gone(tmp_path):
    tracker = open_run(tmp_path / "run")
    tracker.begin(-1)
    report(tracker, 1)
    (tmp_path / "run" / "metrics.jsonl").write_text("{\n{\n")
    tracker.close()
    RunDir.open(tmp_path / "run", {"seed": 1}).close()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["fingerprint"] == {"seed": 1}
