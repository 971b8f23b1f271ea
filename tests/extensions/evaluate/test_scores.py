import random
import statistics
from itertools import combinations

import pytest

from rl4llm.core.base_env import SampleState, Special
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.extensions.evaluate.scores import (
    Problem,
    difference_score,
    differences,
    graded_by,
    mean_score,
    pass_at_k,
    problems_of,
    scores,
    share_score,
)


def problem(name, *earned, **more):
    return Problem(name, tuple(map(float, earned)), sum(value >= 1 for value in earned), **more)


def test_pass_at_k_is_the_share_of_choices_with_a_success():
    for samples in range(1, 8):
        for successes in range(samples + 1):
            for k in range(1, samples + 1):
                chosen = list(combinations([1] * successes + [0] * (samples - successes), k))
                assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(max, chosen)) / len(chosen))


def test_with_one_sample_each_the_interval_is_wilsons():
    score = share_score([1.0] * 8 + [0.0] * 2)
    assert (score.low, score.high) == pytest.approx((0.490162, 0.943318), abs=1e-6)  # of 8 in 10, from tables
    perfect = share_score([1.0] * 10)
    assert perfect.high == 1.0
    assert perfect.low == pytest.approx(0.722467, abs=1e-6)


def test_interval_covers_the_truth_for_equal_attempts():
    """400 sets of 40 problems with 8 samples each; every problem is nearly always solved, or nearly never."""
    dice = random.Random(0)
    covered = {"by problem": 0, "as if all samples were independent": 0}
    for _ in range(400):
        problems = []
        for number in range(40):
            chance = dice.choice((0.05, 0.95))
            problems.append(problem(str(number), *(dice.random() < chance for _ in range(8))))
        samples = [reward for item in problems for reward in item.rewards]
        found = {
            "by problem": scores(problems, [1])["pass@1"],
            "as if all samples were independent": share_score(samples),
        }
        for name, score in found.items():
            covered[name] += score.low <= 0.5 <= score.high
    assert 0.92 < covered["by problem"] / 400 < 0.99
    assert covered["as if all samples were independent"] / 400 < 0.7


def test_paired_difference_is_surer_than_the_scores():
    dice = random.Random(0)
    before, after = [], []
    for number in range(100):
        solved = dice.random() < 0.5
        before.append(problem(str(number), solved))
        after.append(problem(str(number), solved or number < 10))
    changed = differences(after, before, [1])["pass@1"].gained
    apart = scores(after, [1])["pass@1"]
    assert changed.value == pytest.approx(
        scores(after, [1])["pass@1"].value - scores(before, [1])["pass@1"].value
    )
    assert changed.low > 0
    assert changed.high - changed.low < 0.6 * (apart.high - apart.low)


def test_the_interval_of_a_difference_adds_two_attempts():
    changed = difference_score([1.0] * 10 + [-1.0] * 5 + [0.0] * 85)
    gained, lost, number = 10.5, 5.5, 102  # "Wald+2": half a problem more in each cell of the table
    spread = ((gained + lost - (gained - lost) ** 2 / number) / (number * (number - 1))) ** 0.5
    assert changed.value == 0.05
    assert changed.low == pytest.approx((gained - lost) / number - 1.984217 * spread, rel=1e-6)  # t of 99
    assert changed.high == pytest.approx((gained - lost) / number + 1.984217 * spread, rel=1e-6)
    unchanged = difference_score([0.0] * 30)
    assert unchanged.high == -unchanged.low == pytest.approx(0.0649, abs=1e-4)
    gains = [0.01 * number for number in range(-10, 20)]  # of very many attempts: the interval of a t-test
    spread = statistics.stdev(gains) / 30**0.5
    for values, quantile in (
        ([0.0, 2.0], 12.7062),
        ([0.0, 1.0, 2.0], 4.30265),
        ([0.0, 0.0, 2.0, 2.0], 3.18245),
    ):
        half = quantile * statistics.stdev(values) / len(values) ** 0.5
        assert mean_score(values).high == pytest.approx(1 + half, rel=0.008)
    assert difference_score(gains, 1e9).low == pytest.approx(0.045 - 2.04523 * spread, rel=1e-4)


@pytest.mark.parametrize(
    ("problems", "samples", "mean", "found"), [(30, 64, 0.05, 0.6), (30, 64, 0.0, 0.0), (30, 1, 0.05, 0.0)]
)
def test_a_small_gain_is_found_with_many_samples(problems, samples, mean, found):
    """Problems of all difficulties; a paired t-test finds a gain of 5 points in 0.78 of such evaluations."""
    dice = random.Random(0)

    def solved(chance):
        return sum(dice.random() < chance for _ in range(samples))

    better = covered = 0
    for _ in range(250):
        before, after = [], []
        for number in range(problems):
            chance = dice.uniform(0.1, 0.9)
            gain = mean + dice.uniform(-0.1, 0.1)
            for problems_of_one, count in ((before, solved(chance)), (after, solved(chance + gain))):
                problems_of_one.append(Problem(str(number), (0.0,) * samples, count))
        gained = differences(after, before, [1])["pass@1"].gained
        better += gained.low > 0
        covered += gained.low <= mean <= gained.high
    assert covered >= 0.92 * 250
    assert found * 250 <= better <= (found + 0.3) * 250 if found else better <= 0.12 * 250


def test_what_only_one_of_two_evaluations_has_is_not_compared():
    changed = differences([problem("a", 1), problem("b", 1)], [problem("b", 0), problem("c", 0)], [1])
    assert (
        changed["pass@1"].baseline,
        changed["pass@1"].gained.value,
        changed["pass@1"].gained.problems,
    ) == (0.0, 1.0, 1)
    assert changed["pass@1"].gained.low < 0  # one problem shows little
    assert differences([problem("a", 1)], [problem("b", 1)], [1]) == {}


def test_a_problem_counts_where_enough_of_its_samples_are_left():
    found = scores([problem("a", 1, 0), problem("b", 1, failed=1), problem("c", failed=2)], [1, 2])
    assert (found["pass@1"].value, found["pass@1"].problems) == (0.75, 2)
    assert (found["pass@2"].value, found["pass@2"].problems) == (1.0, 1)
    assert found["mean@2"] == found["pass@1"]


def test_scores_of_parts_stand_beside_those_of_all():
    found = scores([problem("x/a", 1, part="x"), problem("y/a", 0, part="y")], [1])
    assert [found[name].value for name in ("pass@1", "part/x/pass@1", "part/y/pass@1")] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("rewards", [(0, 1), (0.0, 0.93, 1), (-1, -0.9, 1), (-1, 0.5)])
def test_interval_of_a_reward_stays_possible(rewards):
    """Whatever a few problems got before and now, no end of an interval lies outside the range of the reward."""
    least, dice = min(rewards), random.Random(0)
    for number in range(2, 40):
        new = [problem(str(n), 1, max(rewards)) for n in range(number)]
        new[-1] = problem(new[-1].prompt_id, *rewards[-2:])
        old = [problem(str(n), least, dice.choice(rewards)) for n in range(number)]
        for some in (new, old):
            score = scores(some, [1])["reward"]
            assert least <= score.low <= score.value <= score.high <= 1
        gained = differences(new, old, [1])["reward"].gained
        assert least - 1 <= gained.low <= gained.value <= gained.high <= 1 - least


def test_rewards_of_0_and_1_have_the_interval_of_shares():
    new, old = ([problem(str(n), *earned) for n in range(9)] for earned in ((1, 1), (0, 1)))
    found, gained = scores(new, [1]), differences(new, old, [1])
    assert found["reward"] == found["mean@2"] and found["reward"].low < 0.8
    assert gained["reward"] == gained["mean@2"] and gained["reward"].gained.low < gained["reward"].gained.high


def test_a_reward_of_another_range_keeps_its_interval():
    problems = [problem("a", 2.0), problem("b", 7.0)]
    assert scores(problems, [1])["reward"] == mean_score([2.0, 7.0])


def test_without_a_success_only_the_reward_has_a_score():
    found = scores([Problem("a", (1.0, 3.0), None), Problem("b", (2.0, 2.0), None)], [1, 2])
    assert {name: score.value for name, score in found.items()} == {"reward": 2.0}


def test_other_reward_of_an_episode_grades_by_its_own_success():
    said = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
    rewards = {"strict": 1.0, "length": 5.0}
    member = Trajectory("a", said, (), rewards, 6.0, "done", successes={"strict": True})
    assert graded_by("strict", [Group("a", (member,))]) == [Problem("a", (1.0,), 1)]
    assert graded_by("length", [Group("a", (member,))]) == [Problem("a", (5.0,), None)]


def test_results_by_problem_count_failures_and_skip_frozen_roles():
    def group(name, role, *earned, frozen=False):
        said = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
        messages = (ChatMessage("user", "?"),)
        members = [
            Trajectory(name, said, messages, {"right": r}, r, "done", role=role, successes={"right": r >= 1})
            for r in earned
        ]
        return Group(name, tuple(members), frozen=frozen)

    pro = Special(role="pro")
    lost = [SampleState("a", 2, [], "", special=pro), SampleState("b", 0, [], "", special=pro)]
    groups = [group("a", "pro", 1.0, 0.5), group("a", "con", 0.0), group("a", "judge", 1.0, frozen=True)]
    found = problems_of(groups, lost)
    assert found == [
        Problem("a", (1.0, 0.5), 1, failed=1, role="pro", answers=("", "")),
        Problem("a", (0.0,), 0, role="con", answers=("",)),
        Problem("b", (), None, failed=1, role="pro"),
    ]
    assert (scores(found, [1])["pass@1"].value, scores(found, [1])["pass@1"].problems) == (0.25, 1)
