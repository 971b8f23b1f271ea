"""The trie of a group: which tokens its records share, and which of them are computed once."""

from itertools import combinations

import numpy as np
import pytest
from packed import tries

from rl4llm.data import layouts
from rl4llm.data.layouts import depth_first, without_short


def common(one, other):
    """Return the number of tokens with which both begin, counted one by one."""
    return next(
        (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def records_of(seed):
    """Return the records of some tries, and their groups."""
    trajectories = tries(seed)
    groups = np.array([int(one.prompt_id[1:]) for one in trajectories])
    return [np.array(one.token_ids) for one in trajectories], groups


@pytest.mark.parametrize("seed", range(8))
def test_records_share_the_least_of_what_neighbours_share(seed):
    records, groups = records_of(seed)
    order, shared = depth_first(records, groups)
    assert sorted(order) == list(range(len(records)))
    for one, other in combinations(range(len(order)), 2):
        a, b = order[one], order[other]
        expected = common(records[a], records[b]) if groups[a] == groups[b] else 0
        assert shared[one + 1 : other + 1].min() == expected


@pytest.mark.parametrize("shortest", [1, 3, 8, 1000])
def test_sharing_few_tokens_is_left_out_but_never_the_prompt(shortest, monkeypatch):
    monkeypatch.setattr(layouts, "SHORTEST", shortest)
    for seed in range(8):
        records, groups = records_of(seed)
        order, shared = depth_first(records, groups)
        groups = groups[order]
        worth = without_short(shared, groups)
        for group in (0, 1):
            here = np.flatnonzero(groups == group)[1:]
            depths = sorted({*worth[here]})
            assert depths[0] == shared[here].min()
            assert (np.diff(depths) >= shortest).all()
            assert (shared[here] >= worth[here]).all() and (shared[here] - worth[here] < shortest).all()
        assert not worth[np.flatnonzero(np.diff(groups, prepend=-1))].any()


def test_few_tokens_beyond_what_others_share_are_repeated(monkeypatch):
    monkeypatch.setattr(layouts, "SHORTEST", 2)
    records = [
        np.array(tokens) for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 9], [1, 8], [1, 2, 3, 7])
    ]
    order, shared = depth_first(records, np.zeros(5, int))
    assert [records[i].tolist()[s:] for i, s in zip(order, without_short(shared, np.zeros(5, int)), strict=True)] == [
        [1, 2, 3, 4, 5], [4, 6], [7], [2, 9], [8],
    ]  # fmt: skip
