"""A run whose episodes play ahead, in a process that is killed after a checkpoint with some of them."""

import contextlib
import io
import signal
import sys

import pytest
import torch
from embedded_server import embedded_server
from ended_runs import metrics
from forked_python import started
from killed_run import die_after
from vowels import Vowels, prompts

from rl4llm.api import GRPOTrainer
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.runs.checkpoint import latest_checkpoint

STEPS, STOPPED = 5, 2


def trainer(model, url, directory):
    return GRPOTrainer(
        str(model), prompts(), [Vowels()], env=BaseMDPEnv, deterministic=True, max_steps=STEPS,
        inference={"name": "embedded", "url": url}, output={"dir": str(directory)}, tracking={"tensorboard": False},
        **{"rollout.max_staleness": 2, "rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 6,
           "env.max_steps": 1, "training.lr": 3e-3, "model.autocast": "none", "eval.every": 0,
           "checkpoint.every": 0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(model_dir):
    with embedded_server(model_dir, "inference.max_rows=1") as (url, _):
        yield url


def test_a_killed_run_trains_what_its_checkpoint_holds(model_dir, url, tmp_path):
    whole, directory = trainer(model_dir, url, tmp_path / "whole").train(), tmp_path / "killed"
    with started(__file__, model_dir, url, directory) as program:
        done = program.end(60)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    checkpoint = latest_checkpoint(directory / "checkpoints")
    assert checkpoint.step == STOPPED
    assert len((checkpoint.path / "played-0.jsonl").read_text().splitlines()) == 4  # the draws of two steps
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = trainer(model_dir, url, directory).train()
    rows = metrics(directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert "4 prompts have been played; 0 are played again" in " ".join(out.getvalue().split())
    expected = dict(whole.trainer.backend.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.trainer.backend.weights())


if __name__ == "__main__":
    run = trainer(*sys.argv[1:4])
    die_after(run.trainer, STOPPED)
    run.train()
