"""Environments for verifiers before 0.4, by a real one in the environment that RL4LLM_VERIFIERS_V0_PYTHON names."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from played import played
from small_run import SmallRun
from test_verifiers import CALL, Remembering
from warm_python import warm_of

from rl4llm.cli import main
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.adapters.verifiers import VerifiersEnv, VerifiersReward, verifiers_prompts
from rl4llm.testing import ScriptedClient

TASK = "verifiers-v0-letters"
COUNT = CALL.replace("letter_toolset_count", "count")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with the tasks."""
    directory = tmp_path_factory.mktemp("tasks")
    shutil.copy(Path(__file__).with_name("verifiers_v0_letters.py"), directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield directory


@pytest.fixture(scope="module")
def real_python(folder):
    chosen = os.environ.get("RL4LLM_VERIFIERS_V0_PYTHON")
    if not chosen:
        pytest.skip(
            "RL4LLM_VERIFIERS_V0_PYTHON does not name the Python of an environment with verifiers before 0.4"
        )
    return chosen


@pytest.fixture(scope="module")
def python(real_python, tmp_path_factory):
    """Return verifiers' Python, which has imported it."""
    imported = (
        "datasets", "openai", "verifiers.clients", "verifiers.envs.tool_env", "verifiers.utils.env_utils",
    )  # fmt: skip
    with warm_of(real_python, tmp_path_factory.mktemp("warm"), *imported) as path:
        yield path


@pytest.fixture(scope="module")
def rows(python):
    return verifiers_prompts("train", 2, task=TASK, python=python)


@pytest.fixture
def play(tokenizer, python, rows):
    """Plays episodes of the first task."""

    def run(client, kind, *, size=1, params=None, max_steps=8):
        given = {"task": TASK, "python": python, "processes": size, "max_steps": max_steps}
        given["options"] = {"kind": kind}
        env = VerifiersEnv(rows[:1], tokenizer, [VerifiersReward()], batch_size=1, group_size=size, **given)
        return played(env, client, roles=None, params=params)

    return run


def test_old_verifiers_list_and_score_one_turn(tokenizer, play, python, rows):
    asked = [message["content"] for message in rows[0]["messages"]]
    assert asked[0] == "Spell." and asked[1].startswith("Say ab")
    (episode,) = play(ScriptedClient(tokenizer, {"": ["a"]}), "single").trajectories
    assert [message.content for message in episode.messages] == [*asked, "a"]
    assert episode.reward == 0.25  # half of half the letters
    assert {"letters": 0.5, "turns": 1.0, "requests": 1}.items() <= episode.extras["metrics"].items()
    evaluated = {
        split: verifiers_prompts(split, 40, task=TASK, python=python, options={"evaluated": 2})
        for split in ("train", "test")
    }
    assert [row["verifiers"]["number"] for row in evaluated["test"]] == [28, 29]
    assert len(evaluated["train"]) == 28  # none of the two that are for evaluation


def test_old_verifiers_play_turns_and_tools_exactly(model, tokenizer, play):
    client = Remembering(model, tokenizer)
    (episode,) = play(client, "multi", params=SamplingParams(max_tokens=6)).trajectories
    spans = [(tuple(span.token_ids), tuple(span.logprobs)) for span in episode.policy_spans]
    assert spans == client.said and len(spans) == 3
    assert episode.messages[-2].content == "Another with ab, number 2."
    assert episode.extras["verifiers"]["stop"] == "enough"
    (called,) = play(ScriptedClient(tokenizer, {"": [COUNT, "b"]}), "tool").trajectories
    assert called.messages[3].content == "4 letters" and called.reward == 0.25
    (endless,) = play(ScriptedClient(tokenizer, {"": [COUNT] * 5}), "tool").trajectories
    assert endless.num_turns == 4  # its limit is below that of the run


def test_old_verifiers_reward_a_group_together(tokenizer, play, rows):
    prompt = rows[0]["prompt_id"]
    said = {f"0/{prompt}/0": ["ab, said at length"], f"0/{prompt}/1": ["b"]}
    result = play(ScriptedClient(tokenizer, said), "group", size=2)
    assert not result.failed, result.failed[0].failure
    long, short = result.trajectories
    assert (long.reward, short.reward) == (0.5, 0.25 + 0.25)
    assert short.extras["metrics"]["shortest"] == 1.0 and long.extras["metrics"]["shortest"] == 0.0
    assert "group" not in short.extras["verifiers"]  # the state is not kept


def test_old_verifiers_end_as_the_policy_plays(tokenizer, play):
    """An empty answer and a limit of turns are bad play, which is scored."""
    (empty,) = play(ScriptedClient(tokenizer, {"": [""]}), "single").trajectories
    assert empty.reward == 0.0
    (cut,) = play(ScriptedClient(tokenizer, {"": ["a", "b"]}), "multi", max_steps=2).trajectories
    assert cut.extras["verifiers"]["stop"] == "max_turns_reached" and cut.reward == 0.25
    full = ScriptedClient(tokenizer, {"": ["a" * 40, "b"]}, context_length=60)
    (full,) = play(full, "multi", params=SamplingParams(max_tokens=40)).trajectories
    assert full.num_turns == 1 and full.reward == 0.25


def test_old_verifiers_faults_leave_the_episode_out(tokenizer, play):
    broken = play(ScriptedClient(tokenizer, {"": ["a"]}), "broken")
    together = play(ScriptedClient(tokenizer, {"": ["a"]}), "broken_group", size=2)
    for sample in (*broken.failed, *together.failed):
        assert "Error calling reward function broken: the judge is away" in sample.failure
    assert (len(broken.failed), len(together.failed)) == (1, 2)
    for kind, problem in (
        ("unknown", "no finite reward"),
        ("away", "the rollout failed in verifiers: .*the machine is away"),
    ):
        (sample,) = play(ScriptedClient(tokenizer, {"": ["a"]}), kind).failed
        assert re.search(problem, sample.failure)


def test_old_verifiers_prompts_have_the_keys_that_were_written(python):
    (row,) = verifiers_prompts("train", 1, task=TASK, python=python, options={"kind": "shots"})
    assert [set(message) for message in row["messages"]] == [
        {"role", "content"},
        {"role", "content", "name"},
        {"role", "content"},
    ]
    with pytest.raises(ConfigError, match="it completes plain text"):
        verifiers_prompts("train", 1, task=TASK, python=python, options={"kind": "text"})


def test_old_environments_need_an_old_verifiers(folder):
    said = "has no verifiers for an environment with `load_environment`.*pip install 'verifiers>=0.1.14,<0.4'"
    with pytest.raises(ConfigError, match=said):
        verifiers_prompts("train", 2, task=TASK, python=sys.executable)


def test_a_configuration_trains_on_old_verifiers(model_dir, tmp_path, python):
    small = SmallRun.at(tmp_path, model_dir)
    env = ["env.name=verifiers", f"env.task={TASK}", f"env.python={python}", "env.options={kind: sums}"]
    run = ["env.processes=2", "data.path=null", "rewards=null", "rollout.prompts=1", "max_steps=1"]
    assert main(["train", *small.into("run", *env, *run)]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["reward/verifiers"] for step in steps] == pytest.approx(
        [0.5 * step["env/sums"] + 0.25 * step["env/shortest"] for step in steps]
    )
    assert len(steps) == 1 and all(step["reward/std"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert all(step["env/generated_tokens"] == step["env/trained_tokens"] > 0 for step in steps)
