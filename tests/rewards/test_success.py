"""What a success is: a reward defines it, wrappers carry it, a configuration sets it, and nobody guesses it."""

import pytest

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.tables import REWARDS
from rl4llm.rewards import Clip, Gate, Scale, Threshold, as_reward_function
from rl4llm.rewards.scoring import successes


class Close(BaseRewardFunction):
    """Defines a success at 0.5."""

    success_at = 0.5

    def __init__(self, name="close"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return 0.0


class Open(Close):
    """Defines no success."""

    success_at = None


REWARDS.register("test_success_open")(Open)


@pytest.mark.parametrize(
    ("wrapped", "expected"),
    [
        (Clip(Close(), low=0.0, high=0.5), 0.5),
        (Clip(Close(), low=0.0, high=0.4), None),
        (Clip(Close(), low=0.5), None),
        (Scale(Close(), factor=4.0, offset=-1.0), 1.0),
        (Scale(Close(), factor=-1.0), None),
        (Threshold(Open(), at_least=0.2, above=3.0), 3.0),
        (Threshold(Close(), at_least=0.2, above=-1.0, below=0.0), None),
        (Gate(Close(), by=Open()), 0.5),
        (Gate(Close(), by=Open(), otherwise=0.5), None),
        (Gate(Open(), by=Close()), None),
    ],
)
def test_wrapper_carries_success_where_its_scores_show_it(wrapped, expected):
    assert wrapped.success_at == expected


def test_only_rewards_of_right_answers_define_success():
    ours = [name for name in REWARDS if REWARDS.path_of(name).startswith("rl4llm.")]
    defining = {name for name in ours if getattr(REWARDS[name], "success_at", None) is not None}
    assert defining == {"math", "code", "reasoning_gym", "task"}


def test_configuration_and_function_set_success_at():
    def graded(completions):
        return [0.0 for _ in completions]

    assert as_reward_function(graded).success_at is None
    graded.success_at = 0.25
    assert as_reward_function(graded).success_at == 0.25
    assert as_reward_function({"name": "test_success_open", "success_at": 2}).success_at == 2
    assert as_reward_function({"name": "test_success_open"}).success_at is None


def test_first_reward_with_success_at_decides():
    earned = {"open": 9.0, "close": 0.5, "other": 0.0}
    won = successes([Open("open"), Close(), Close("other")], earned, reward=0.0, success_at=1.0)
    assert list(won.items()) == [("close", True), ("other", False)]
    assert successes([Open("open")], earned, reward=9.0) == {}
    assert successes([Open("open")], earned, reward=9.0, success_at=9.5) == {"": False}
    assert successes([], {}, reward=9.5, success_at=9.5) == {"": True}
