"""Runs as text."""

import json

from extensions.view.runs import episode, write_run
from forked_python import python

from rl4llm.core.types import Group
from rl4llm.tracking.episodes import EpisodeLog

FOREIGN = "env/all/reward/total"


def printed(*runs):
    done = python("-m", "rl4llm", "view", *map(str, runs), "--terminal")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_shown_as_text(tokenizer, tmp_path):
    run = write_run(tmp_path / "run", tokenizer)
    with open(run / "metrics.jsonl", "a") as file:  # a flat curve has no line
        for step in (1, 2, 3):
            file.write(json.dumps({"step": step, "accuracy": step / 10, "truncated": 0.0}) + "\n")
    text = episode(tokenizer, "9", answer=f"\x1b[2J{'so ' * 400}", reward=1.0)
    EpisodeLog(run / "episodes", resume_step=9).log(9, [Group("9", (text,))])
    text = printed(run)
    assert text.startswith("run: Training accuracy 10 % → 30 % in 3 steps")
    assert "No alerts.\n" in text and "\x1b" not in text
    names = [line.split()[0] for line in text.splitlines() if "  steps " in line]
    assert names == ["reward/mean", "accuracy", "loss"]
    assert "▁▅█ 0.100 → 0.300  steps 1 to 3  run" in text
    assert (
        "user: How much is" in text and 'calls {"type": "function", "function": {"name": "calculator"' in text
    )
    assert "assistant: \\x1b[2Jso so " in text and " … 604 more characters\nreward 1.0, done\n" in text


def test_seeds_are_one_curve_and_other_metrics_are_drawn(tokenizer, tmp_path):
    seeds = [write_run(tmp_path / f"s-{n}", tokenizer, offset=n, seed=n) for n in range(2)]
    other = tmp_path / "other"
    other.mkdir()
    rows = [{"step": step, FOREIGN: step / 10, "optim/lr": 0.1} for step in range(3)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = printed(*seeds)
    assert "0.600 → 0.800  steps 1 to 3  s (mean of 2 seeds)" in text
    assert [line.split()[0] for line in printed(other).splitlines() if "  steps " in line] == [FOREIGN]
