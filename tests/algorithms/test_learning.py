"""Every registered method learns a task of two turns, and would not without a learning rate."""

import pytest
from learning import THRESHOLD, learn
from recipes import RECIPES

from rl4llm.algorithms import ALGORITHMS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_method_learns_the_task(name, tmp_path):
    curve = learn(name, RECIPES[name], tmp_path)
    assert curve.before < 0.75 * THRESHOLD
    assert curve.after > THRESHOLD


@pytest.mark.parametrize("name", ["grpo", "ppo", "remax"])
def test_without_a_learning_rate_the_threshold_is_not_reached(name, tmp_path):
    curve = learn(name, RECIPES[name], tmp_path, learns=False)
    assert curve.after < 0.7 * THRESHOLD
    assert max(curve.rewards) < THRESHOLD
