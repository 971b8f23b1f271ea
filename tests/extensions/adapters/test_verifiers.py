"""Environments of verifiers, by the real package. It pins other versions of packages than the trainer, so it needs
a separate environment, which RL4LLM_VERIFIERS_PYTHON names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from played import played
from small_run import SmallRun
from warm_python import warm_of

import rl4llm
from rl4llm.cli import main
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.adapters.verifiers import VerifiersEnv, VerifiersReward, verifiers_prompts
from rl4llm.inference.local import LocalClient
from rl4llm.testing import ScriptedClient

PACKAGE = Path(rl4llm.__file__).parent
TASK = "verifiers_tasks"
CALL = '<tool_call>\n{"name": "letter_toolset_count", "arguments": {"word": "abab"}}\n</tool_call>'


@pytest.fixture(scope="module")
def real_python(tmp_path_factory):
    """verifiers' Python, in a directory where the tasks are."""
    chosen = os.environ.get("RL4LLM_VERIFIERS_PYTHON")
    if not chosen:
        pytest.skip("RL4LLM_VERIFIERS_PYTHON does not name the Python of an environment with verifiers 0.4")
    directory = tmp_path_factory.mktemp("tasks")
    for name in ("verifiers_tasks.py", "verifiers_letters.py"):
        shutil.copy(Path(__file__).with_name(name), directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield chosen


@pytest.fixture(scope="module")
def python(real_python, tmp_path_factory):
    """Return verifiers' Python, which has imported it."""
    imported = (
        "mcp", "openai", "verifiers.v1.clients", "verifiers.v1.harnesses.null", "verifiers.v1.tasksets",
        "verifiers.v1.utils.loaders",
    )  # fmt: skip
    with warm_of(real_python, tmp_path_factory.mktemp("warm"), *imported) as path:
        yield path


@pytest.fixture(scope="module")
def rows(real_python, python):
    pythons = {"train": real_python, "test": python}
    return {split: verifiers_prompts(split, 8, task=TASK, python=pythons[split]) for split in pythons}


@pytest.fixture
def play(tokenizer, python, rows):
    """Plays episodes of the first task."""

    def run(client, *, size=1, row=None, params=None, **options):
        given = {"task": TASK, "python": python, "processes": size, **options}
        row = row or rows["train"][0]
        env = VerifiersEnv([row], tokenizer, [VerifiersReward()], batch_size=1, group_size=size, **given)
        return played(env, client, roles=None, params=params)

    return run


class Remembering(LocalClient):
    """The embedded engine, and all that it sampled."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.said = []

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        self.said.append((tuple(completion.token_ids), tuple(completion.logprobs)))
        return completion


def test_verifiers_tasks_are_listed_and_splits_share_no_prompt(rows):
    first = rows["train"][0]
    assert first["messages"][0] == {"role": "system", "content": "Count."}
    assert first["prompt_id"] == f"{TASK}-{first['verifiers']['number']}"
    asked = {split: {row["messages"][1]["content"] for row in rows[split]} for split in rows}
    assert len(asked["train"]) == 8 and asked["test"] and not asked["train"] & asked["test"]


def test_an_episode_with_tools_earns_what_verifiers_gives(tokenizer, play, rows):
    client = ScriptedClient(tokenizer, {"": [CALL, "4"]})
    (episode,) = play(client, row=rows["train"][1], options={"taskset": {"task": {"tools": {}}}}).trajectories
    assert [message.role for message in episode.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert "4 letters" in episode.messages[3].content
    assert episode.reward == 0.5 + 0.25 * 0.25  # the right number; no reply counts as shorter than 4
    assert episode.extras["verifiers"]["rewards"] == {"right": 0.5, "short": 0.0625}
    assert {"turns": 2.0, "right": 0.5, "requests": 2}.items() <= episode.extras["metrics"].items()


def test_every_token_is_recorded_as_it_was_sampled(model, tokenizer, play):
    client = Remembering(model, tokenizer)
    episodes = play(client, size=2, params=SamplingParams(max_tokens=12)).trajectories
    spans = [span for episode in episodes for span in episode.policy_spans]
    assert sorted((tuple(span.token_ids), tuple(span.logprobs)) for span in spans) == sorted(client.said)
    assert len(client.said) == 2 and all(
        episode.reward == episode.extras["verifiers"]["reward"] for episode in episodes
    )


def test_episode_that_hits_the_turn_limit_is_scored(tokenizer, play, rows):
    client = ScriptedClient(tokenizer, {"": [CALL] * 3})
    options = {"taskset": {"task": {"tools": {}}}}
    result = play(client, row=rows["train"][1], options=options, max_steps=1)
    assert not result.failed, result.failed[0].failure
    (episode,) = result.trajectories
    assert episode.extras["verifiers"]["stop"] == "max_turns"
    assert episode.extras["metrics"]["requests"] == 1 and episode.reward < 0.5


BASH = '<tool_call>{"name": "bash", "arguments": {"command": "expr 37 + 48 | tee sum && ls"}}</tool_call>'


def test_a_harness_of_verifiers_plays_without_uv(tokenizer, play, rows, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    client = ScriptedClient(tokenizer, {"": [BASH, "4"]})
    agent = {"agent": {"harness": {"id": "bash"}}}
    (episode,) = play(client, options=agent).trajectories
    assert episode.messages[0].content.startswith("You are a coding agent") and not episode.forks
    assert "85" in episode.messages[3].content and "sum" in episode.messages[3].content
    assert episode.extras["verifiers"]["metrics"]["turns"] == 2 and len(episode.policy_spans) == 2


def test_a_harness_that_compacts_trains_its_summary(tokenizer, play):
    client = ScriptedClient(tokenizer, {"": [BASH, "The sum is 85.", "4"]})
    harness = {"id": "bash", "compaction": {"summarize_at_tokens": 60}}
    (episode,) = play(client, options={"agent": {"harness": harness}}).trajectories
    metrics = episode.extras["metrics"]
    assert metrics["requests"] == 3 and metrics["trained_tokens"] == metrics["generated_tokens"]
    texts = [message.content for message in episode.messages]
    assert len(episode.forks) == 1 and any("The sum is 85." in text for text in texts)


@pytest.mark.parametrize(("broken", "said"), [
    pytest.param("raises", "the judge is away", marks=pytest.mark.sweep),
    ("dies", "exit code 7"),
    ("nan", "no finite rewards"),
])  # fmt: skip
def test_what_breaks_in_verifiers_leaves_the_episode_out(tokenizer, play, broken, said):
    options = {"taskset": {"task": {"broken": broken}}}
    result = play(ScriptedClient(tokenizer, {"": ["2"]}), options=options)
    assert not result.trajectories
    assert said in result.failed[0].failure and result.failed[0].failure_class == "agent/crashed"


def test_task_that_changed_since_listing_is_not_played(tokenizer, play, rows):
    row = {**rows["train"][0], "verifiers": {"number": 1, "hash": rows["train"][0]["verifiers"]["hash"]}}
    result = play(ScriptedClient(tokenizer, {"": ["2"]}), row=row)
    assert "differs from when the tasks were listed" in result.failed[0].failure


@pytest.mark.parametrize("changes", [
    {"task": "verifiers_taskz"},
    {"options": {"taskset": {"wordz": 3}}},
    {"options": {"id": "user-sim"}},
    {"python": sys.executable},  # without verifiers
])  # fmt: skip
def test_tasks_that_verifiers_cannot_list_are_refused(python, changes):
    with pytest.raises(ConfigError):
        verifiers_prompts("train", 2, **{"task": TASK, "python": python, **changes})


def test_a_configuration_trains_on_tasks_of_verifiers(model_dir, tmp_path, python):
    small = SmallRun.at(tmp_path, model_dir)
    env = [
        "env.name=verifiers", f"env.task={TASK}", f"env.python={python}", "env.processes=2", "data.path=null",
    ]  # fmt: skip
    assert main(["train", *small.into("run", *env, "rewards=null", "rollout.prompts=1", "max_steps=1")]) == 0
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["reward/verifiers"] == pytest.approx(step["env/right"] + step["env/short"])
    assert step["env/generated_tokens"] == step["env/trained_tokens"] > 0


def test_verifiers_refuse_without_the_agents_extension(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "rl4llm", ignore=lambda folder, names: {"agents"} & set(names))
    code = "from rl4llm.envs import ENVIRONMENTS; ENVIRONMENTS['verifiers']"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "'agent_env'" in done.stderr
