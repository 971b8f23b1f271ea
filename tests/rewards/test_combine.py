"""Several rewards become one."""

import math

import pytest
import torch

from rl4llm.core.errors import RewardError
from rl4llm.rewards.combine import add, multiply, weighted_sum

REWARDS = {"math": torch.tensor([1.0, 0.0, 1.0]), "format": torch.tensor([1.0, 1.0, 0.5])}


def test_a_weighted_sum_weighs_each_reward_by_its_name():
    assert weighted_sum({"format": 0.5, "math": 2.0})(REWARDS).tolist() == [2.5, 0.5, 2.25]


def test_rewards_and_weights_must_have_the_same_names():
    with pytest.raises(RewardError, match=r"no weight for 'format'.*Give 0"):
        weighted_sum({"math": 1.0})(REWARDS)
    with pytest.raises(
        RewardError, match=r"reward='fromat' is unknown. Known: format, math. Did you mean 'format'"
    ):
        weighted_sum({"math": 1.0, "format": 1.0, "fromat": 1.0})(REWARDS)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1.0", None, True])
def test_weights_must_be_finite_numbers(weight):
    with pytest.raises(RewardError, match="weight of 'math'"):
        weighted_sum({"math": weight})


def test_no_weights_at_all_are_refused():
    with pytest.raises(RewardError, match="got none"):
        weighted_sum({})


def test_add_and_multiply_do_what_they_say():
    assert add(REWARDS).tolist() == [2.0, 1.0, 1.5]
    assert multiply(REWARDS).tolist() == [1.0, 0.0, 0.5]
