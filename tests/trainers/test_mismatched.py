"""KTO's mismatched answers: never to the same prompt, and the same ones however rows fall on ranks."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from invariance import Exchange, ThreadRanks

from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.runtime.ranks import Ranks
from rl4llm.trainers.mismatched import mismatched


def row(prompt, answer):
    spans = (
        TokenSpan.context((prompt, 1)),
        TokenSpan((answer,) * (1 + answer % 3), "policy", (0.0,) * (1 + answer % 3)),
    )
    return Trajectory(str(prompt), spans, (), {}, 1.0, "done")


def pairs(rows, ranks=None):
    """Return (prompt, answer) of what is compared."""
    found = mismatched(rows, ranks or Ranks())
    assert all(len(one.spans[1].token_ids) == 1 + one.spans[1].token_ids[0] % 3 for one in found)
    return [(one.spans[0].token_ids[0], one.spans[1].token_ids[0]) for one in found]


def on_ranks(*shares):
    exchange = Exchange(len(shares))

    def of_rank(rank):
        with exchange:
            return pairs(shares[rank], ThreadRanks(rank, len(shares), exchange))

    with ThreadPoolExecutor(len(shares)) as pool:
        return [pair for found in pool.map(of_rank, range(len(shares))) for pair in found]


ROWS = [
    row(prompt, 10 * prompt + number)
    for prompt, number in ((5, 0), (7, 0), (5, 1), (6, 0), (8, 0), (5, 2), (6, 1))
]


def test_each_answer_is_used_with_another_prompt():
    found = pairs(ROWS)
    assert all(answer // 10 != prompt for prompt, answer in found)
    assert sorted(prompt for prompt, _ in found) == [5, 5, 5, 6, 6, 7, 8]
    assert sorted(answer for _, answer in found) == [50, 51, 52, 60, 61, 70, 80]


@pytest.mark.parametrize(
    ("prompts", "count"), [((5, 5, 5), 0), ((5,), 0), ((), 0), ((5, 5, 5, 6), 2), ((5, 6, 5), 2)]
)
def test_rows_without_a_partner_of_another_prompt_are_left_out(prompts, count):
    found = pairs([row(prompt, 10 * prompt + number) for number, prompt in enumerate(prompts)])
    assert len(found) == count
    assert all(answer // 10 != prompt for prompt, answer in found)


@pytest.mark.parametrize("cuts", [(0, 3, 7), (0, 0, 7), (0, 1, 4, 7)])
def test_neither_ranks_nor_order_change_who_is_paired(cuts):
    shares = [ROWS[start:end] for start, end in itertools.pairwise(cuts)]
    assert on_ranks(*shares) == pairs(ROWS)
    assert sorted(on_ranks(*(share[::-1] for share in shares[::-1]))) == sorted(pairs(ROWS))
