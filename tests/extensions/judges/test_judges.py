"""Judges of several roles: who wins, and what is no verdict."""

import asyncio

import pytest

from rl4llm.core.base_env import Line, SampleState, Special
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.judges.judges import BaseJudge, Winner
from rl4llm.rewards import RewardFailure, Scale, as_reward_function, check_examples
from rl4llm.rewards.scoring import score


def samples(*said, ground_truth="4"):
    """One sample for each role of an episode."""
    transcript = [Line(*line) for line in said]
    roles = dict.fromkeys(line.role for line in transcript)
    prompt, columns = [ChatMessage("user", "2+2?")], {"transcript": transcript}
    return [
        SampleState("p", 0, prompt, ground_truth, columns | {"role": role}, special=Special(role))
        for role in roles
    ]


CASES = [
    ([("pro", "Answer: 4"), ("con", "Answer: 5")], {"pro": 1.0, "con": 0.0}),
    ([("pro", "Answer: 5"), ("con", "Answer: 4")], {"pro": 0.0, "con": 1.0}),
    ([("pro", "Answer: 5"), ("con", "Answer: 6")], {"pro": 0.0, "con": 0.0}),
    ([("pro", "Answer: 4"), ("con", "Answer: 4")], {"pro": 1.0, "con": 0.0}),
    (
        [("pro", "Answer: 5"), ("con", "Answer: 4"), ("pro", "Right, answer: 4"), ("con", "Answer: 4")],
        {"pro": 0.0, "con": 1.0},
    ),
    (
        [*[("pro", "Answer: 4"), ("con", "Answer: 4")] * 2, ("pro", "Or 5? Answer: 5"), ("pro", "Answer: 4")],
        {"pro": 0.0, "con": 1.0},
    ),
    ([("pro", "Answer: 4"), ("con", "I do not know.")], {"pro": 1.0, "con": 0.0}),
]


@pytest.mark.parametrize(("said", "expected"), CASES)
def test_who_is_right_in_the_end_and_has_been_the_longest_wins(said, expected):
    reward = Winner()
    try:
        found = score(batch := samples(*said), [reward]).reward.tolist()
    finally:
        reward.close()
    assert {sample.role: value for sample, value in zip(batch, found, strict=True)} == expected


def test_winner_scores_each_line_once():
    asked = []

    def right(completions, ground_truth):
        asked.append(list(completions))
        return [float(text == truth) for text, truth in zip(completions, ground_truth, strict=True)]

    reward = Winner(by=right)
    batch = [*samples(("pro", "4"), ("con", "5")), *samples(("pro", "6"), ("con", "7"), ground_truth="7")]
    assert score(batch, [reward]).reward.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert asked == [["4", "5", "6", "7"]]


@pytest.mark.parametrize("bad", [None, float("nan"), RewardFailure("no worker")])
def test_winner_without_a_score_leaves_only_that_episode_out(bad):
    def right(completions):
        return [bad if text == "?" else 1.0 for text in completions]

    reward = Winner(by=right)
    batch = [*samples(("pro", "4"), ("con", "?")), *samples(("pro", "4"), ("con", "5"))]
    found = score(batch, [reward]).reward
    assert found.isnan().tolist() == [True, True, False, False]
    assert found[2:].tolist() == [1.0, 0.0]


def test_its_examples_hold_and_so_do_those_of_the_reward_it_asks():
    reward = Winner()
    check_examples([reward])
    check_examples([Scale(reward, 2.0)])
    reward.close()


def test_async_judge_judges_each_episode_once():
    class Later(BaseJudge):
        async def judge(self, transcript, ground_truth, **columns):
            await asyncio.sleep(0)
            if transcript[0].text == "?":
                raise ValueError("cannot judge")
            return {line.role: float(len(line.text)) for line in transcript}

    batch = [*samples(("pro", "4"), ("con", "five")), *samples(("pro", "?"), ("con", "5"))]
    found = score(batch, [Later("later")]).reward
    assert found[:2].tolist() == [1.0, 4.0]
    assert [sample.failure_class for sample in batch] == ["", "", "later/raised", "later/raised"]


def test_a_configuration_names_it_and_wrong_options_are_refused():
    made = as_reward_function({"name": "winner", "by": {"name": "math", "extract": "answer"}})
    assert isinstance(made, BaseJudge)
    made.close()
    for by in (Winner(), {"name": "tool_use", "per_turn": True}):
        with pytest.raises(ConfigError):
            Winner(by=by)
