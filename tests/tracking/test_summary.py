import math
from dataclasses import replace

import pytest

from rl4llm.core.base_env import SampleState
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.tracking.summary import summarize

PROMPT = TokenSpan.context([1, 2, 3])


def policy(count, version=0):
    return TokenSpan(tuple(range(count)), "policy", (-0.5,) * count, version)


def trajectory(reward, *spans, rewards=None, stop_reason="done", prompt_id="p", **more):
    if rewards is None:
        rewards, more["successes"] = {"right": reward}, {"right": reward >= 1}
    asked = (ChatMessage("user", "?"),)
    return Trajectory(prompt_id, (PROMPT, *spans), asked, rewards, reward, stop_reason, **more)


def failed():
    sample = SampleState("p", 0, [ChatMessage("user", "?")], "42")
    sample.fail("the tool broke", "env/raised")
    return sample


def test_every_metric_of_a_rollout_worked_out_by_hand():
    tool = TokenSpan.context([7, 8])
    one = trajectory(1.0, policy(4), tool, policy(2))
    two = trajectory(0.0, policy(10), stop_reason="length")
    three = trajectory(0.5, policy(2), prompt_id="q", stop_reason="context")
    metrics = summarize([Group("p", (one, two)), Group("q", (three,))], [failed()])
    assert metrics.pop("reward/std") == pytest.approx(math.sqrt(1 / 6))
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/right": 0.5,
            "accuracy": 1 / 3,
            "completion_length/mean": 6.0,
            "completion_length/p90": 10.0,
            "completion_length/max": 10.0,
            "prompt_length/mean": 3.0,
            "turns": 4 / 3,
            "truncated": 2 / 3,
            "stop/done": 1 / 3,
            "stop/length": 1 / 3,
            "stop/context": 1 / 3,
            "surprise": 0.5,
            "groups/count": 1.0,
            "groups/zero_spread": 0.0,
            "trajectories": 3.0,
            "failures": 1.0,
            "failures/env/raised": 1.0,
        }
    )


def test_p90_is_a_length_that_nine_of_ten_do_not_exceed():
    members = tuple(trajectory(0.0, policy(length)) for length in range(1, 21))
    assert summarize([Group("p", members)])["completion_length/p90"] == 18.0


def test_a_turn_of_two_weight_versions_counts_as_one():
    assert summarize([Group("p", (trajectory(1.0, policy(2, 3), policy(2, 4)),))])["turns"] == 1.0


def test_accuracy_counts_only_episodes_whose_success_is_defined():
    rewards = {"exact": 1.0, "length": 2.0}
    undefined = trajectory(3.0, policy(1), rewards=rewards)
    assert "accuracy" not in summarize([Group("p", (undefined,))])
    won = trajectory(3.0, policy(1), rewards=rewards, successes={"exact": True, "length": False})
    lost = trajectory(3.0, policy(1), rewards=rewards, successes={"exact": False, "length": True})
    assert summarize([Group("p", (undefined, won, lost, won))])["accuracy"] == pytest.approx(2 / 3)


def test_reward_names_do_not_hide_the_combined_reward():
    one = trajectory(3.0, policy(1), rewards={"mean": 1.0, "std": 2.0})
    metrics = summarize([Group("p", (one,))])
    assert [metrics[f"reward/{name}"] for name in ("mean", "std", "mean_", "std_")] == [3.0, 0.0, 1.0, 2.0]


def test_a_rollout_that_failed_completely_has_only_counts():
    assert summarize([], [failed(), failed()]) == {
        "trajectories": 0.0,
        "failures": 2.0,
        "failures/env/raised": 2.0,
    }


def test_reward_faults_and_retries_are_counted():
    noted = {"reward_notes": {"math": "timeout: took more than 2 s"}, "played_again_after": "engine/aborted"}
    members = [replace(trajectory(0.0, policy(1)), extras=extras) for extras in (noted, noted, {})]
    metrics = summarize([Group("p", tuple(members))])
    assert (metrics["model_faults/math/timeout"], metrics["played_again/engine/aborted"]) == (2.0, 2.0)
