"""What turns earn, where the history of an episode was rewritten on the way."""

from dataclasses import replace

import pytest
import torch

from rl4llm.algorithms.gigpo import GiGPO
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.returns import turn_returns, turn_rewards
from rl4llm.core.types import Group, Origin, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.runtime.returned import checked_credits


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
    turns = zip(values_GK.tolist(), group().trajectories, strict=True)
    return [row[: one.num_turns] for row, one in turns]


def test_every_record_ends_with_the_return_of_its_episode():
    assert numbers(turn_rewards(group())) == [[0.0, 1.0, 1.0], [0.25]]


def test_turn_returns_use_the_record_of_the_turn():
    assert numbers(turn_returns(group(), 0.5)) == [[0.5, 1.0, 1.0], [0.25]]


@pytest.mark.parametrize(
    ("relation", "turn", "ends", "returns"),
    [
        ("continues", 2, [1.0, 8.0, 8.0], [3.0, 4.0, 8.0]),
        ("rewrites", 2, [1.0, 8.0, 8.0], [3.0, 4.0, 8.0]),
        ("rewrites", 1, [1.0, 2.0, 8.0], [2.0, 2.0, 8.0]),  # beside the second turn
        ("called", 2, [1.0, 2.0, 8.0], [2.0, 2.0, 8.0]),
        (None, 2, [1.0, 2.0, 8.0], [2.0, 2.0, 8.0]),
    ],
)
def test_turns_before_a_record_earn_what_follows_in_it(relation, turn, ends, returns):
    origins = (relation and Origin(relation, 0, turn),)
    first, later = record([1], [2], [3], [4]), record([5], [6])
    one = Trajectory("p", first, (), {}, 9.0, "done", turn_rewards=(1.0, 0.0, 6.0), forks=(later,))
    one = Group("p", (replace(one, origins=origins),))
    assert [turn_rewards(one).tolist(), turn_returns(one, 0.5).tolist()] == [[ends], [returns]]


def test_discount_counts_turns_across_records():
    spans = record([1], [2], [3], [4], [5], [6], [7], [8])
    whole = Trajectory("p", spans, (), {}, 10.0, "done", turn_rewards=(1.0, 2.0, 0.0, 4.0))
    parts = (spans[2:4], spans[4:6], spans[6:])
    origins = tuple(Origin("continues", number, 1) for number in range(3))
    compacted = replace(whole, spans=spans[:2], forks=parts, origins=origins)
    group = Group("p", (whole, compacted))
    for discount in (0.5, 1.0):
        one, other = turn_returns(group, discount).tolist()
        assert one == other
    assert turn_rewards(group)[1].tolist() == turn_returns(group, 1.0)[0].tolist()


def test_turns_of_a_fork_are_compared_where_their_states_recur():
    plain, compared = (GiGPO(step_coef=coef).credits(group()) for coef in (0.0, 1.0))
    (first, second, fork), (other,) = ([b - a for a, b in zip(*rows, strict=True)] for rows in
                                       zip(numbers(plain), numbers(compared), strict=True))  # fmt: skip
    assert first == pytest.approx(-other) and first > 0  # both after the prompt
    assert second == fork == 0.0  # the only ones from their states


def test_a_turn_that_two_versions_wrote_counts_once():
    (opening, said), (asked, ended) = record([1], [2, 3]), record([4], [5, 6])
    first, rest = (
        TokenSpan((token,), "policy", (-0.5,), version) for version, token in enumerate(said.token_ids)
    )
    other = Trajectory("p", record([1], [7], [8], [9]), (), {}, 0.25, "done")

    def numbers(*spans):
        group = Group("p", (Trajectory("p", spans, (), {}, 1.0, "done", turn_rewards=(0.5, 0.25)), other))
        (credits,) = checked_credits(GiGPO(), [group], lambda tensor: tensor)
        (batch,) = Batching().pack(group.trajectories, credits)
        turns = GRPO(turn_discount=0.5).credits(group)
        return [turn_rewards(group), turn_returns(group, 0.5), turns, batch.credits_BT]

    whole, continued = numbers(opening, said, asked, ended), numbers(opening, first, rest, asked, ended)
    assert all(one.equal(two) for one, two in zip(whole, continued, strict=True))


def test_numbers_after_the_last_turn_are_not_read():
    class Padded(GiGPO):
        def credits(self, group):
            return turn_rewards(group).where(turn_rewards(group) > 0, torch.nan)

    short, long = Trajectory("p", record([1], [7]), (), {}, 0.25, "done"), record([1], [7], [8], [9])
    longer = Group("p", (short, Trajectory("p", long, (), {}, 1.0, "done", turn_rewards=(0.5, 0.5))))
    assert checked_credits(Padded(), [longer], None) == [[[0.25], [0.5, 0.5]]]
