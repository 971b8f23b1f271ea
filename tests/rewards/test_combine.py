"""Several rewards become one."""

import pytest
import torch

from rl4llm.core.errors import RewardError
from rl4llm.rewards.combine import add, multiply, weighted_sum

REWARDS = {"math": torch.tensor([1.0, 0.0, 1.0]), "format": torch.tensor([1.0, 1.0, 0.5])}


def test_a_weighted_sum_weighs_each_reward_by_its_name():
    assert weighted_sum({"format": 0.5, "math": 2.0})(REWARDS).tolist() == [2.5, 0.5, 2.25]


def test_rewards_and_weights_must_have_the_same_names():
    with pytest.raises(RewardError):
        weighted_sum({"math": 1.0})(REWARDS)
    with pytest.raises(RewardError):
        weighted_sum({"math": 1.0, "format": 1.0, "fromat": 1.0})(REWARDS)


def test_add_and_multiply_do_what_they_say():
    assert add(REWARDS).tolist() == [2.0, 1.0, 1.5]
    assert multiply(REWARDS).tolist() == [1.0, 0.0, 0.5]
