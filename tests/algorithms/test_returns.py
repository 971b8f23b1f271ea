"""What turns earn, where the history of an episode was rewritten on the way."""

import pytest

from rl4llm.algorithms.gigpo import GiGPO
from rl4llm.algorithms.returns import turn_returns, turn_rewards
from rl4llm.core.types import Group, TokenSpan, Trajectory


def record(*spans):
    """Build a trajectory whose spans alternate between context and policy."""
    return tuple(
        TokenSpan(tuple(ids), "policy", (-0.5,) * len(ids), 0) if number % 2 else TokenSpan.context(ids)
        for number, ids in enumerate(spans)
    )


def group():
    """Return an episode of two turns and a fork of one, beside one of a single turn."""
    rewritten = Trajectory(
        "p", record([1], [2], [3], [4]), (), {}, 1.0, "done", forks=(record([1, 2, 9], [5, 6]),)
    )
    return Group("p", (rewritten, Trajectory("p", record([1], [7]), (), {}, 0.25, "done")))


def numbers(values_GK):
    return [[value for value in row if value == value] for row in values_GK.tolist()]


def test_every_record_ends_with_the_return_of_its_episode():
    assert numbers(turn_rewards(group())) == [[0.0, 1.0, 1.0], [0.25]]


def test_turn_returns_use_the_record_of_the_turn():
    assert numbers(turn_returns(group(), 0.5)) == [[0.5, 1.0, 1.0], [0.25]]


def test_turns_of_a_fork_are_compared_where_their_states_recur():
    plain, compared = (GiGPO(step_coef=coef).credits(group()) for coef in (0.0, 1.0))
    (first, second, fork), (other,) = ([b - a for a, b in zip(*rows, strict=True)] for rows in
                                       zip(numbers(plain), numbers(compared), strict=True))  # fmt: skip
    assert first == pytest.approx(-other) and first > 0  # both after the prompt
    assert second == fork == 0.0  # the only ones from their states
