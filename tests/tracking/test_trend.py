"""The alert on a reward that stays where it was: on curves that are stored, and on ones with known noise."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from rl4llm.tracking.alerts import Alerts
from rl4llm.tracking.trend import FEWEST, Change, Trend

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


def rows(successes, seed=0, groups=16, size=8):
    """Yield metrics of steps with these chances of success: prompts differ, and eight samples share a prompt."""
    chance = random.Random(seed)
    for success in successes:
        success = min(max(success, 0.01), 0.99)
        prompts = [chance.betavariate(2 * success, 2 - 2 * success) for _ in range(groups)]
        scores = [float(chance.random() < prompt) for prompt in prompts for _ in range(size)]
        mean = math.fsum(scores) / len(scores)
        yield {
            "reward/mean": mean,
            "reward/std": math.sqrt(mean * (1 - mean)),
            "accuracy": mean,
            "grad_norm": 0.3,
            "loss": 0.1,
            "tokens/s": 1.0,
        }


def begins(metrics):
    """Return the steps in which the alert began."""
    alerts = Alerts()
    told = [alert for step, row in enumerate(metrics, 1) for alert in alerts.take(step, row)]
    return [alert.step for alert in told if alert.name == "no progress" and alert.until is None]


def share(curve, seeds=40, steps=60, **noise):
    """Return the share of the seeds in which the alert begins."""
    return sum(bool(begins(rows(map(curve, range(steps)), seed, **noise))) for seed in range(seeds)) / seeds


def stored_curves():
    """Yield the success at each step of each stored run of a recipe, between its evaluations on a straight line."""
    for file in sorted(RECIPES.glob("*/results.json")):
        for variant in json.loads(file.read_text())["variants"].values():
            for run in variant["seeds"].values():
                points = [(step, value) for step, value, *_ in run["curve"] if 0 <= value <= 1]
                if len(points) > 2 and points[-1][1] - points[0][1] > 0.1:
                    yield (
                        file.parent.name,
                        [
                            begin + (end - begin) * (step - first) / (last - first)
                            for (first, begin), (last, end) in pairwise(points)
                            for step in range(first, last)
                        ],
                    )


def test_a_flat_reward_is_reported_once_its_noise_allows():
    assert share(lambda step: 0.5) >= 0.85
    assert share(lambda step: 0.3, steps=40, groups=32) >= 0.9
    assert not any(begins(rows([0.5] * FEWEST, seed, groups=128)) for seed in range(5))  # at least five signs


def test_a_reward_that_rises_is_not_reported():
    assert share(lambda step: 0.3 + 0.2 * step / 40) <= 0.1
    assert share(lambda step: 0.2 + 0.4 * (1 - math.exp(-step / 8))) <= 0.05  # and then stays


def test_stored_runs_that_learned_are_not_reported():
    curves = list(stored_curves())
    told = [name for seed, (name, curve) in enumerate(curves) if begins(rows(curve, seed))]
    assert len(curves) > 30 and len(told) <= len(curves) / 20, told


@pytest.mark.parametrize(
    "more",
    [
        {"accuracy": 0.9},
        {"role/judge/reward/mean": 0.0},
        {"curriculum/skipped": 0.2},
        {"part/sums/weight": 0.5},
        {"grad_norm": None},
        {"reward/std": math.nan},
    ],
    ids=["solved", "opponents learn", "prompts follow", "parts follow", "no update", "unknown noise"],
)
def test_a_flat_reward_that_is_expected_is_not_reported(more):
    flat = list(rows([0.5] * 80))
    assert begins(flat) and not begins(row | more for row in flat)


def test_the_alert_ends_when_the_reward_moves():
    alerts = Alerts()
    metrics = rows([0.3] * 50 + [0.7] * 50, groups=32)
    told = [alert for step, row in enumerate(metrics, 1) for alert in alerts.take(step, row)]
    first, last = (alert for alert in told if alert.name == "no progress")
    assert first.step < 50 < last.until < 80


def test_the_change_is_welchs_between_the_thirds():
    trend = Trend()
    values = [1000 + (step % 2) + (step >= 20) for step in range(30)]
    for value in values:
        trend.take({"reward/mean": value, "reward/std": 2.0, "grad_norm": 1.0})
    change = trend.change()
    variance = 10 * 0.25 / 9  # of five zeros and five ones
    assert (change.begin, change.end, change.scale) == pytest.approx((1000.5, 1001.5, 2.0))
    assert change.error == pytest.approx(math.sqrt(2 * variance / 10))


def test_the_change_is_noise_within_three_errors():
    verdicts = [Change(30, 0.5, 0.5 + size, 0.01, 0.5).is_noise for size in (-0.04, -0.02, 0.02, 0.04)]
    assert verdicts == [False, True, True, False]
