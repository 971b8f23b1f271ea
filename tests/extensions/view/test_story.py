"""What the first page says, and which episodes a file keeps."""

import pytest
from extensions.view.runs import episode, write_run

from rl4llm.core.types import Group
from rl4llm.extensions.view.choice import choose
from rl4llm.extensions.view.index import COLUMNS
from rl4llm.extensions.view.run import find_runs
from rl4llm.extensions.view.story import Totals, episodes, headline
from rl4llm.extensions.view.words import lines_of, odd
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.tracker import JsonlTracker


def row(**values):
    return [{"set": "step", "more": {}, "failure": "", "odd": "", **values}.get(name) for name in COLUMNS]


def said(steps, running=False, alerts=(), **config):
    totals = Totals()
    totals.add(steps)
    return headline(totals, {"config": config, "running": running, "alerts": list(alerts)})


@pytest.mark.parametrize("answer, what", [
    ("the cat " * 20, "repeats itself"),
    ("a \ufffd b", "broken characters"),
    ("  \n", "empty"),
    ("The cat sat on the mat, and the dog sat on the floor beside the door.", ""),
    ("def f(n):\n    return n ** 2 + 10", ""),
    ("==================== 42", ""),
])  # fmt: skip
def test_odd_answers_are_found(answer, what):
    assert odd(answer) == what


def test_question_is_what_the_policy_was_asked_last():
    shown = [{"role": "user", "content": "example?"}, {"role": "assistant", "content": "example"}]
    asked = [{"role": "user", "content": "real?\n\nmore"}, {"role": "assistant", "content": "```\nyes\n```"}]
    assert lines_of([*shown, *asked], 1) == ("real? \u23ce more", "yes", "")
    assert lines_of([*shown, *asked[:1]], 0) == ("real? \u23ce more", "", "")
    assert lines_of(None, 1) == lines_of([3], None) == ("", "", "")


def test_headline_has_outcome_steps_time_model_and_algorithm():
    steps = [{"step": step, "eval/accuracy": value} for step, value in ((0, 0.117), (10, 0.9), (20, 0.83))]
    steps += [{"step": step, "time/step": 60.0, "reward/mean": 0.1} for step in range(1, 21)]
    config = {"model.path": "models/Small-1B", "algorithm.name": "grpo"}
    sentence = "Held-out accuracy 11.7 % \u2192 83 % in 20 steps, 20 min, Small-1B, GRPO"
    assert said(steps, **config)["text"] == sentence
    assert ", warm, GRPO" in said(steps, **{**config, "model.path": "runs/warm/model"})["text"]
    assert said(steps[3:5])["text"] == "Training reward 0.1 \u2192 0.1 in 2 steps, 2 min"
    assert said(steps[:1], running=True)["text"] == "0 steps so far"


def test_headline_names_alerts():
    alerts = [
        {"name": "timeouts", "since": 3, "until": 5},
        {"name": "no gradient", "since": 9, "until": None},
    ]
    assert said([])["alerts"] == "No alerts."
    assert (
        said([], alerts=alerts)["alerts"] == "2 alerts: timeouts (steps 3 to 5), no gradient (since step 9)."
    )


def test_story_of_a_run_that_trains_grows_and_restarts(tokenizer, tmp_path):
    directory = write_run(tmp_path / "run", tokenizer, steps=3)
    (run,) = find_runs([directory])
    run.index.refresh(60)
    assert run.story()["text"].startswith("Training reward 0.1 \u2192 0.3 in 3 steps")
    metrics = JsonlTracker(directory / "metrics.jsonl", resume_step=3)
    metrics.log(4, {"reward/mean": 0.9})
    assert run.story()["text"].startswith("Training reward 0.1 \u2192 0.9 in 4 steps")
    metrics.close()
    JsonlTracker(directory / "metrics.jsonl", resume_step=2).close()
    EpisodeLog(directory / "episodes", resume_step=2)
    run.index.refresh(60)
    story = run.story()
    assert story["text"].startswith("Training reward 0.1 \u2192 0.2 in 2 steps") and story["generation"] == 1
    assert len(story["shown"]) == 3 and all(one["number"] < len(run.index.rows) for one in story["shown"])


def test_truncated_answer_with_a_high_reward_is_suspicious(tokenizer, tmp_path):
    directory = write_run(tmp_path / "run", tokenizer, steps=1)
    long = episode(tokenizer, "long", answer="It is 42", reward=1.0, stop="length")
    EpisodeLog(directory / "episodes", resume_step=1).log(2, [Group("long", (long,))])
    (run,) = find_runs([directory])
    run.index.refresh(60)
    first = run.story()["suspicious"][0]
    assert first["why"] == "a high reward for a truncated answer, step 2: reward 1"
    assert run.index.episode(first["number"])["prompt_id"] == "long"


def test_only_a_large_mismatch_is_suspicious():
    rows = [row(step=1, reward=1.0, mismatch=mismatch) for mismatch in (2e-6, 0.09, 0.3, 0.2)]
    assert episodes(rows[:2])["suspicious"] == []
    (one,) = episodes(rows)["suspicious"]
    assert one == {"number": 2, "why": "the largest log-prob mismatch, step 1: 0.3 nats"}


def test_run_without_episodes_or_metrics_has_a_story(tmp_path):
    (tmp_path / "episodes").mkdir()
    (run,) = find_runs([tmp_path])
    assert run.story() | {"shown": [], "suspicious": []} == run.story()
    assert run.story()["text"] == "0 steps"


def test_file_keeps_extremes_and_some_of_each_step():
    places = [(step, prompt, sample) for step in range(50) for prompt in range(4) for sample in range(4)]
    rows = [
        row(file=step, step=step, prompt=f"{step}-{prompt}", reward=float(prompt == 1 > sample), tokens=10)
        for step, prompt, sample in places
    ]
    rows[333] = row(file=20, step=20, prompt="20-3", reward=-7.0, tokens=99)
    kept = list(choose(rows, [5, 6], 220))
    assert len(kept) == len(set(kept)) == 220 and kept[:2] == [5, 6] and 333 in kept
    assert {rows[number][COLUMNS.index("step")] for number in kept} == set(range(50))
    mixed = {number for number in range(len(rows)) if rows[number][COLUMNS.index("prompt")] == "40-1"}
    assert mixed <= set(kept)  # whole, and before the groups of equal rewards
    equal = [row(file=step, step=step, prompt=str(step), reward=0.0) for step in range(50)]
    assert sorted(choose(equal, [], 8))[-2] > 25  # not only the first files, and the last as an extreme
    few = list(choose(rows, [], 24))
    steps = sorted({rows[number][COLUMNS.index("step")] for number in few})
    assert steps[0] == 0 and steps[-1] == 49 and len(steps) >= 5
    assert list(choose([], [], 10)) == list(choose(rows, [1], 0)) == []
