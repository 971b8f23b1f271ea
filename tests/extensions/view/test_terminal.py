import json
import os
import subprocess
import sys

import pytest
from extensions.view.runs import episode, write_run
from forked_python import python

from rl4llm.core.types import Group
from rl4llm.tracking.episodes import EpisodeLog


def printed(*runs, **environ):
    command = ["-m", "rl4llm", "view", *map(str, runs), "--terminal"]
    environ = {"COLUMNS": "80", **environ}
    if "PYTHONIOENCODING" in environ:  # which Python reads when it starts
        given = {"env": {**os.environ, **environ}, "capture_output": True, "check": True, "encoding": "utf-8"}
        return subprocess.run([sys.executable, *command], **given).stdout
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        done = python(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_shown_as_text(tokenizer, tmp_path):
    run = write_run(tmp_path / "run", tokenizer)
    with open(run / "metrics.jsonl", "a") as file:  # neither the same curve twice nor a flat one
        for step in (1, 2, 3):
            file.write(json.dumps({"step": step, "accuracy": step / 10, "truncated": 0.0}) + "\n")
    said = episode(tokenizer, "9", answer=f"\x1b[2J{'so ' * 400}", reward=1.0)
    EpisodeLog(run / "episodes", resume_step=9).log(9, [Group("9", (said,))])
    text = printed(run)
    assert text.startswith("run: Training accuracy 10 % → 30 % in 3 steps")
    assert "No alerts.\n" in text and "\x1b" not in text and max(map(len, text.split("\n"))) < 800
    reward, loss = text.split("─┐\n")[1:]
    assert "reward/mean, run" in text and "loss, run" in text
    rising, falling = (curve.split("│\n")[0][1:6] for curve in (reward, loss))
    assert not rising.strip() and falling.strip()  # the first line of a curve has its highest point
    assert (
        "user: How much is" in text and 'calls {"type": "function", "function": {"name": "calculator"' in text
    )
    assert "assistant: \\x1b[2Jso so " in text and " … 604 more characters\nreward 1.0, done\n" in text


def test_seeds_are_one_curve_and_other_runs_have_marks(tokenizer, tmp_path):
    seeds = [write_run(tmp_path / f"s-{n}", tokenizer, offset=n, seed=n) for n in range(2)]
    other = write_run(tmp_path / "other", tokenizer, lr="2.0e-4", offset=0.2)
    assert "reward/mean, s (mean of 2 seeds)" in printed(*seeds)
    text = printed(*seeds, other)
    assert "** s (mean of 2 seeds)   oo other" in text
    assert "***" in text and "ooo" in text and "▄" not in text  # without colours
    assert "▄" in printed(*seeds, other, FORCE_COLOR="1", TERM="xterm-256color")
    assert "Training reward 0.1 ? 0.3" in printed(seeds[0], PYTHONIOENCODING="ascii")


FOREIGN = "env/all/reward/total"


def test_metrics_of_another_program_are_drawn_as_text(tmp_path):
    rows = [{"step": step, FOREIGN: step / 10, "optim/lr": 0.1} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = printed(tmp_path)
    assert f"{FOREIGN}, " in text and "optim/lr" not in text  # which is flat
