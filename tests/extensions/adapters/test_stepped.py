"""Environments with `reset` and `step`, and factories, that other projects' users bring."""

from pathlib import Path

import pytest
from played import played

from rl4llm.extensions.adapters import stepped
from rl4llm.extensions.adapters.step_rewards import StepRewards
from rl4llm.extensions.adapters.stepped import SteppedEnv
from rl4llm.testing import ScriptedClient, check_env


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(stepped, "_MADE", {})


def made(tokenizer, name, limit=2, max_steps=3, **options):
    rows = SteppedEnv.prompts("train", limit, task=f"stepped_tasks:{name}", options=options)
    return SteppedEnv(rows, tokenizer, [StepRewards()], batch_size=1, group_size=2, max_steps=max_steps)


def play(env, tokenizer, script):
    return played(env, ScriptedClient(tokenizer, script), group_size=2)


def test_class_with_reset_and_step_is_played(tokenizer):
    env = made(tokenizer, "Guess", most=5)
    system, user = env.dataset[0]["messages"]
    assert (system["role"], system["content"]) == ("system", "0 to 5")
    number = user["content"].removeprefix("Guess ").removesuffix(".")
    played = play(env, tokenizer, {"": ["x", number]})
    assert [trajectory.turn_rewards for trajectory in played.trajectories] == [(0.0, 1.0)] * 2
    assert {trajectory.stop_reason for trajectory in played.trajectories} == {"done"}
    assert not played.failed


def test_same_seed_gives_the_same_prompts(tokenizer, monkeypatch):
    first = [row["messages"] for row in made(tokenizer, "Guess", limit=8).dataset]
    monkeypatch.setattr(stepped, "_MADE", {})
    assert [row["messages"] for row in made(tokenizer, "Guess", limit=8).dataset] == first
    held_out = SteppedEnv.prompts("test", 8, task="stepped_tasks:Guess")
    assert [row["messages"] for row in held_out] != first
    assert len({row["messages"][1]["content"] for row in held_out}) > 1


def test_five_results_of_a_step_are_read(tokenizer):
    played = play(made(tokenizer, "Plain"), tokenizer, {"": ["stop"] * 2})
    assert all(trajectory.reward in (0.5, 1.0) for trajectory in played.trajectories)
    assert {trajectory.stop_reason for trajectory in played.trajectories} == {"done"}


def test_factory_of_queries_is_played(tokenizer):
    env = made(tokenizer, "SumFactory")
    assert [message["content"] for message in env.dataset[1]["messages"]] == ["Add.", "10+1="]
    prompt = env.dataset[0]["prompt_id"]
    won, lost = play(env, tokenizer, {f"0/{prompt}/0": ["1", "2"], "": ["1", "9", "9"]}).trajectories
    assert (won.turn_rewards, won.stop_reason) == ((1.0, 1.0), "done")
    assert lost.turn_rewards == (1.0, 0.0, 0.0)
    check_env(env, ["1"])


def test_environment_that_begins_otherwise_fails_the_episode(tokenizer, monkeypatch):
    env = made(tokenizer, "Drifts")
    monkeypatch.setattr(stepped, "_MADE", {})  # another process
    played = play(env, tokenizer, {"": ["x"]})
    assert not played.trajectories and {sample.failure_class for sample in played.failed} == {"env/raised"}
