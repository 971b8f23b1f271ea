"""Training in a shell: hidden tests give the reward, and a killed run takes the same steps."""

import json
import shlex
import shutil
import signal
import sys

import pytest
import torch
from ended_runs import metrics
from forked_python import started
from killed_run import die_after

from rl4llm.compose.setup import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tools.formats import CallFormat, ToolCall
from rl4llm.extensions.workspaces.shell import ShellEnv
from rl4llm.rewards import as_reward_function
from rl4llm.runs.checkpoint import latest_checkpoint
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (scripts/install_sandbox.sh)"
)


def noted(text):
    """Yield a command that shows a reply and the replies before it, which is the same in every run."""
    yield ToolCall(
        "shell", {"command": f"printf '%s\\n' {shlex.quote(text)} >> seen; cksum < seen; cat seen; false"}
    )


class EveryReply(ShellEnv):
    """Runs a command for every reply, whatever a random model writes."""

    continue_truncated = True
    format = CallFormat(noted)


class Parity(BaseRewardFunction):
    """Rewards episodes whose replies have an odd sum of characters, so that every change of a reply changes the weights."""

    def __init__(self):
        super().__init__("parity")

    def __call__(self, messages, ground_truth, **columns):
        return float(sum(map(ord, "".join(message.content for message in messages[1:]))) % 2)


def trainer(model_dir, output, *changes):
    config = load_config(None, [
        f"model.path={model_dir}", "model.autocast=none", f"output.dir={output}", "eval.every=0", "rollout.prompts=2",
        "rollout.group_size=4", "rollout.max_tokens=6", "training.lr=3e-3", "env.max_steps=2", "env.calls=block",
        "env.workspace={image: host, count: 8}", "tracking.tensorboard=false", "checkpoint.every=0", "deterministic=true",
        "max_steps=3", *changes,
    ])  # fmt: skip
    rows = [
        {"messages": [{"role": "user", "content": f"Task {number}."}], "ground_truth": ""}
        for number in range(4)
    ]
    return build_trainer(config, Given(dataset=rows, reward_functions=[Parity()], env_class=EveryReply))


def test_a_killed_run_in_a_shell_ends_the_same(model_dir, tmp_path):
    with started(__file__, model_dir, tmp_path / "killed") as program:
        done = program.end(240)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert latest_checkpoint(tmp_path / "killed" / "checkpoints").step == 2
    weights = []
    for name in ("whole", "killed"):
        with trainer(model_dir, tmp_path / name) as run:
            run.train()
            weights.append(torch.cat([tensor.flatten() for _, tensor in run.backend.weights()]))
    assert torch.equal(*weights)
    rows = metrics(tmp_path / "whole")
    assert [row["env/commands"] for row in rows] == [2.0] * 3 and sum(row["reward/std"] for row in rows) > 0


def test_a_deterministic_engine_does_not_wait_for_places(model_dir, tmp_path):
    with trainer(model_dir, tmp_path, "env.workspace={count: 1}", "max_steps=1") as run:
        run.train()
    (row,) = metrics(tmp_path)
    assert row["env/commands"] == 2.0 and row["failures"] == 0


TEST = """#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat answer)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
rm -f answer
"""


@pytest.fixture
def task(tmp_path):
    directory = tmp_path / "task"
    (directory / "tests").mkdir(parents=True)
    (directory / "task.toml").write_text('version = "1.0"\n[environment]\nworkdir = "/work"\n')
    (directory / "instruction.md").write_text("Write 42 to the file answer.")
    (directory / "tests" / "test.sh").write_text(TEST)
    return directory


def block(command):
    return f"```sh\n{command}\n```"


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([block("pwd; ls / | grep tests; echo 42 > answer"), "Done."], 1.0),
        (
            [block("echo 41 > answer; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"), "Done."],
            0.0,
        ),
        (["I cannot."], 0.0),
        ([block("echo 42 > answer") + " and so on" * 500], 0.0),  # cut before it runs
    ],
)
def test_hidden_tests_decide_the_reward_of_an_episode(turns, reward, task, tokenizer):
    rows = [{"messages": [{"role": "user", "content": "Do it."}], "ground_truth": "", "task": str(task)}]
    env = ShellEnv(rows, tokenizer, [as_reward_function("task")], 1, 1, calls="block")
    client = ScriptedClient(tokenizer, {"": turns})
    with Runner() as runner:
        runner.run(client.load(WeightRef(0)))
        rollout = Rollout(env, client, Renderer.of(env, tokenizer), runner, seed=0)
        (trajectory,) = rollout.play([0], step=0, sampling_params=SamplingParams(max_tokens=300)).trajectories
    env.close()
    verdict = trajectory.extras["task"]
    assert trajectory.reward == verdict["reward"] and json.dumps(verdict)
    assert trajectory.reward == reward and trajectory.extras["metrics"]["tests_timed_out"] == 0
    if reward == 1.0:
        assert trajectory.messages[2].content == "/work"  # and no tests yet
        assert "+42" in trajectory.extras["changes"]  # before the tests removed it


if __name__ == "__main__":
    with trainer(*sys.argv[1:3]) as run:
        die_after(run, 2)
        run.train()
