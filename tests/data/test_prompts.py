"""The prompt stream is shared out without gaps, in an order of seed and epoch alone, and resumable."""

import json
from collections import Counter
from itertools import chain

import pytest

from rl4llm.core.errors import CheckpointError
from rl4llm.data.prompts import PromptStream


def take(streams, batches):
    """Take the prompts of all ranks in the order of the sequence."""
    return [row for _ in range(batches) for stream in streams for row in stream.next_batch()]


def ranks(world_size, *, num_rows=10, batch_size=2, **options):
    return [
        PromptStream(num_rows, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def test_an_epoch_has_every_row_once_in_disjoint_shards():
    streams = ranks(3, num_rows=12, batch_size=2)
    shards = [list(chain(stream.next_batch(), stream.next_batch())) for stream in streams]
    assert sorted(chain(*shards)) == list(range(12))


def test_batches_run_over_the_end_of_an_epoch_and_drop_no_row():
    rows = take(ranks(1, num_rows=10, batch_size=4), 15)
    assert all(sorted(rows[start : start + 10]) == list(range(10)) for start in range(0, 60, 10))
    tiny = PromptStream(3, 8, shuffle=False)
    assert tiny.next_batch() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert tiny.next_batch() == [2, 0, 1, 2, 0, 1, 2, 0]


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    rows = take(ranks(1, num_rows=50, batch_size=10), 10)
    assert rows == take(ranks(5, num_rows=50, batch_size=2), 10)
    assert rows != take(ranks(1, num_rows=50, batch_size=10, seed=43), 10)
    assert rows[:50] != rows[50:]
    assert take(ranks(1, num_rows=50, batch_size=10, shuffle=False), 10) == [*range(50), *range(50)]


def test_the_order_is_the_same_on_every_machine():
    assert PromptStream(8, 8, seed=42).next_batch() == [0, 1, 2, 3, 5, 7, 4, 6]


def test_a_resumed_stream_continues_exactly():
    whole, cut = PromptStream(10, 3), PromptStream(10, 3)
    expected = take([whole], 9)
    begun = take([cut], 4)
    resumed = PromptStream(10, 3)
    resumed.restore(json.loads(json.dumps(cut.state())))
    assert begun + take([resumed], 5) == expected
    assert resumed.state() == whole.state()
    assert resumed.epoch == 2.7


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_prompts_are_shared_evenly_and_in_the_same_order(world_size):
    (alone,), streams = ranks(1, batch_size=2 * world_size), ranks(world_size)
    for total in (None, 7, 1, 0, 4, None):
        shares = [stream.next_batch(total) for stream in streams]
        assert list(chain(*shares)) == alone.next_batch(total)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [stream.state() for stream in streams] == [alone.state()] * world_size
    assert streams[-1].earlier == Counter(chain(*shares[:-1]))


@pytest.mark.parametrize("later", [1, 3, 4])
def test_changing_ranks_or_batches_skips_and_repeats_no_prompt(later):
    expected = take(ranks(1, batch_size=60), 1)
    before = ranks(2, batch_size=3)
    begun = take(before, 2)
    after = ranks(later, batch_size=4)
    for stream in after:
        stream.restore(before[-1].state())
    assert begun + take(after, 3) == expected[: 12 + 12 * later]


@pytest.mark.parametrize("change", [{"num_rows": 11}, {"seed": 1}, {"shuffle": False}])
def test_a_cursor_of_another_sequence_is_refused(change):
    state = PromptStream(10, 2).state()
    other = PromptStream(**{"num_rows": 10, "batch_size": 2, **change})
    with pytest.raises(CheckpointError):
        other.restore(state)
