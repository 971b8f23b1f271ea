"""Methods learn a task of two turns, and would not without a learning rate; a sweep tries every registered one."""

import pytest
from learning import THRESHOLD, learn
from recipes import RECIPES
from sweeps import sampled

from rl4llm.algorithms import ALGORITHMS

SAMPLE = ("ppo", "sdpo")
"""With a critic, and with a teacher that reads feedback.

tests/trainers/test_training.py has what GRPO learns, test_preferences.py there what the methods for data,
online DPO and distillation learn; the numbers of all methods are in test_golden and test_oracles."""


@pytest.mark.parametrize("name", sampled(ALGORITHMS, SAMPLE))
def test_the_method_learns_the_task(name, tmp_path):
    curve = learn(name, RECIPES[name], tmp_path)
    assert curve.before < 0.75 * THRESHOLD
    assert curve.after > THRESHOLD


@pytest.mark.sweep  # what the threshold is worth; the test above compares it with the first step
@pytest.mark.parametrize("name", ["grpo", "ppo", "remax"])
def test_without_a_learning_rate_the_threshold_is_not_reached(name, tmp_path):
    curve = learn(name, RECIPES[name], tmp_path, learns=False)
    assert curve.after < 0.7 * THRESHOLD
    assert max(curve.rewards) < THRESHOLD
