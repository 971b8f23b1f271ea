"""Length and DAPO's overlong penalty."""

import pytest

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.core.errors import ConfigError, RewardError
from rl4llm.core.types import TokenSpan
from rl4llm.rewards.length import LengthReward
from rl4llm.rewards.overlong import OverlongPenalty
from rl4llm.rewards.scoring import check_examples, score


def spoken(*turns):
    """Return a sample with policy turns of the given lengths, each followed by ten tokens of context."""
    spans = [TokenSpan.context(range(10))]
    for length in turns:
        spans += [TokenSpan(tuple(range(length)), "policy", (0.0,) * length, 0), TokenSpan.context(range(10))]
    return SampleState("p", 0, [ChatMessage("user", "?")], None, spans=spans)


def said(*replies):
    messages = [ChatMessage("user", "?"), ChatMessage("assistant", "of the prompt")]
    messages += [ChatMessage("assistant", reply) for reply in replies]
    return SampleState("p", 0, messages, None, init_msg_size=2)


def test_overlong_follows_equation_13_of_dapo():
    lengths = [1, 161, 10895, 13857, 16383, 16384, 16385, 18227, 20479, 20480, 20481, 20998, 23792, 25000]
    expected = [0.0] * 6 + [-0.000244140625, -0.449951171875, -0.999755859375] + [-1.0] * 5
    penalty = OverlongPenalty(max_length=20480, buffer=4096)
    assert [penalty.at(length) for length in lengths] == pytest.approx(expected, abs=1e-12)


def test_overlong_scales_with_its_factor_and_stops_at_it():
    lengths = [1, 60, 76, 79, 80, 81, 93, 99, 100, 101, 107, 108, 115, 130]
    expected = [0.0] * 5 + [-0.025, -0.325, -0.475] + [-0.5] * 6
    penalty = OverlongPenalty(max_length=100, buffer=20, factor=0.5)
    assert [penalty.at(length) for length in lengths] == pytest.approx(expected, abs=1e-12)


def test_overlong_counts_the_policys_tokens_over_all_turns():
    penalty = OverlongPenalty(max_length=100, buffer=20)
    samples = [spoken(80), spoken(40, 50), spoken(200), spoken()]
    assert score(samples, [penalty]).reward.tolist() == [0.0, -0.5, -1.0, 0.0]


def test_the_length_score_falls_linearly_outside_the_bounds():
    reward = LengthReward(min_length=10, max_length=20, margin=4)
    expected = {5: 0, 6: 0, 8: 0.5, 10: 1, 20: 1, 21: 0.75, 22: 0.5, 24: 0, 99: 0}
    assert {length: reward.at(length) for length in expected} == expected


def test_without_a_margin_the_score_is_a_step():
    reward = LengthReward(max_length=20, inside=0.0, outside=-1.0)
    assert [reward.at(length) for length in (0, 20, 21)] == [0.0, 0.0, -1.0]


def test_lengths_count_only_the_policys_tokens_and_characters():
    assert LengthReward(max_length=20).score_batch([spoken(20), spoken(10, 11)]) == [1.0, 0.0]
    assert LengthReward(max_length=6, unit="chars").score_batch(
        [said("abc", "def"), said("abc", "defg")]
    ) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [LengthReward(max_length=5), OverlongPenalty(max_length=5, buffer=2)])
def test_token_counts_cannot_come_from_messages(reward):
    with pytest.raises(RewardError):
        reward([ChatMessage("assistant", "x")], None)


@pytest.mark.parametrize("unit", ["chars", "tokens"])
def test_the_examples_hold(unit):
    check_examples(
        [LengthReward(max_length=30, margin=7, unit=unit), OverlongPenalty(max_length=5, buffer=2)]
    )


@pytest.mark.parametrize("bounds", [(3, 4, 0), (-1, 0, 0), (3, 0, -1), (3, -1, 0)])
def test_impossible_bounds_do_not_start(bounds):
    max_length, min_length, margin = bounds
    with pytest.raises((ConfigError, RewardError)):
        check_examples([LengthReward(max_length=max_length, min_length=min_length, margin=margin)])


@pytest.mark.parametrize("options", [{"buffer": 0}, {"buffer": 101}, {"buffer": 5, "factor": -1.0}])
def test_impossible_overlong_options_do_not_start(options):
    with pytest.raises((ConfigError, RewardError)):
        check_examples([OverlongPenalty(max_length=100, **options)])
