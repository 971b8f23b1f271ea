"""The running means of roles are the same on all ranks and after a resume, and take off what a role wins anyway."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import pytest
import torch
from invariance import Exchange, TableBackend, ThreadRanks, groups, table

from rl4llm.algorithms import RAE
from rl4llm.core.types import Group
from rl4llm.data.pack import Batching
from rl4llm.trainers.prepare import Preparation

ROLES = ("proposer", "solver")


def of_roles(found):
    """Return the groups with roles in turn; the first wins more than the second."""
    return [
        Group(
            group.prompt_id,
            tuple(
                replace(one, role=ROLES[i % 2], reward=abs(one.reward) + 3 * (i % 2 == 0))
                for one in group.trajectories
            ),
        )
        for i, group in enumerate(found)
    ]


def prepared(algorithm, found, ranks=None):
    batching = Batching("packed", "token", 0, 10**5, 10**5)
    extra = {} if ranks is None else {"ranks": ranks}
    preparation = Preparation(algorithm=algorithm, policy=TableBackend(table(1)), batching=batching, **extra)
    return preparation.prepare(found, 0).credits


@pytest.mark.parametrize("shares", [(3, 2), (5, 0), (1, 1, 3)])
def test_ranks_agree_on_the_mean_of_a_role(shares):
    found, exchange = of_roles(groups()), Exchange(len(shares))
    alone = RAE()
    prepared(alone, found)

    def run(rank):
        algorithm, begin = RAE(), sum(shares[:rank])
        with exchange:
            own = found[begin : begin + shares[rank]]
            prepared(algorithm, own, ThreadRanks(rank, len(shares), exchange))
        return algorithm.state()["means"]

    with ThreadPoolExecutor(len(shares)) as pool:
        for means in pool.map(run, range(len(shares))):
            assert means == pytest.approx(alone.state()["means"])
            assert set(means) == {"/proposer", "/solver"}


def test_a_resumed_run_compares_with_the_same_mean():
    algorithm, resumed, found = RAE(), RAE(), of_roles(groups())
    raw = prepared(algorithm, found)
    resumed.restore(algorithm.state())
    assert prepared(resumed, found) == prepared(algorithm, found) != raw


def test_what_a_role_wins_anyway_is_no_advantage():
    algorithm = RAE()
    leads = []
    for seed in range(8):
        credits = prepared(algorithm, of_roles(groups(seed=seed)))
        proposer, solver = (torch.tensor(list(chain(*credits[first::2]))).mean() for first in (0, 1))
        leads.append(proposer - solver)
    assert leads[0] > 2
    assert abs(sum(leads[4:])) / 4 < 0.7
