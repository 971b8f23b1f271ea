"""A run whose episodes play ahead, in a process that is killed after a checkpoint with some of them."""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sys

import pytest
import torch
from embedded_server import embedded_server
from forked_python import started
from killed_run import die_after
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.runs.checkpoint import latest_checkpoint

STEPS, STOPPED = 5, 2
ROWS = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": str(i)} for i in range(6)]


class Slow(BaseMDPEnv):
    """Episodes of every other prompt never end in the run that is killed."""

    continue_truncated = True

    async def respond(self, sample):
        late = int(sample.ground_truth) % 2 and int(sample.session.partition("/")[0]) == STOPPED
        await asyncio.sleep(3600 if late and os.environ.get("KILLED") else 0)
        return []


def trainer(model, url, directory, repeatable):
    return GRPOTrainer(
        str(model), ROWS, [Vowels()], env=BaseMDPEnv if repeatable else Slow, deterministic=repeatable, max_steps=STEPS,
        inference={"name": "embedded", "url": url}, output={"dir": str(directory)}, tracking={"tensorboard": False},
        **{"rollout.max_staleness": 2, "rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 6,
           "env.max_steps": 1 if repeatable else 2, "training.lr": 3e-3, "model.autocast": "none", "eval.every": 0,
           "checkpoint.every": 0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(model_dir):
    with embedded_server(model_dir, "inference.max_rows=1") as (url, _):
        yield url


def resumed(model_dir, url, directory, repeatable):
    """Kill a run and finish it; return it, and how many draws were stored, taken over and played again."""
    os.environ["KILLED"] = "1"
    with started(__file__, model_dir, url, directory, int(repeatable)) as program:
        done = program.end(60)
    del os.environ["KILLED"]
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    checkpoint = latest_checkpoint(directory / "checkpoints")
    assert checkpoint.step == STOPPED
    stored = (checkpoint.path / "played-0.jsonl").read_text().splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = trainer(model_dir, url, directory, repeatable).train()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows) <= 2
    played, again = re.search(
        r"(\d+) prompts have been played; (\d+) are played\s+again", out.getvalue()
    ).groups()
    return run, len(stored), int(played), int(again)


def test_a_killed_run_trains_what_its_checkpoint_holds(model_dir, url, tmp_path):
    whole = trainer(model_dir, url, tmp_path / "whole", True).train()
    run, stored, played, again = resumed(model_dir, url, tmp_path / "killed", True)
    assert (stored, played, again) == (4, 4, 0)  # the draws of two steps
    expected = dict(whole.trainer.backend.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.trainer.backend.weights())


def test_a_killed_run_plays_again_what_had_not_ended(model_dir, url, tmp_path):
    _, stored, played, again = resumed(model_dir, url, tmp_path / "killed", False)
    assert again >= 1 and played + again == 4 and stored == played


if __name__ == "__main__":
    run = trainer(*sys.argv[1:4], repeatable=bool(int(sys.argv[4])))
    die_after(run.trainer, STOPPED)
    run.train()
