"""The harness that runs a test's functions on several ranks."""

import time

import pytest
import torch


def summed(ranks, tensor):
    return ranks.rank, ranks.total(tensor * (ranks.rank + 1))


def fails_on_the_second(ranks):
    if ranks.rank == 1:
        raise ValueError("of rank 1 alone")
    ranks.wait()


def hangs_on_the_second(ranks):
    if ranks.rank == 1:
        time.sleep(60)


def test_each_rank_answers(on_ranks):
    (first, one), (second, other) = on_ranks(summed, torch.ones(2))
    assert (first, second) == (0, 1)
    assert one.tolist() == other.tolist() == [3.0, 3.0]


def test_a_broken_rank_fails_the_test_and_the_next_call_restarts(on_ranks):
    with pytest.raises(
        AssertionError, match=r"rank 1 failed:[\s\S]*of rank 1 alone[\s\S]*rank 0[\s\S]*in wait"
    ):
        on_ranks(fails_on_the_second)
    with pytest.raises(AssertionError, match=r"rank 0 was done.[\s\S]*in hangs_on_the_second"):
        on_ranks(hangs_on_the_second, deadline_s=2.0)
    assert len(on_ranks(summed, torch.ones(1))) == 2
