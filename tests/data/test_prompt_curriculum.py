"""Prompts that are solved always or never come in few epochs, on any number of ranks, after a resume, at a bounded cost."""

import json
from collections import Counter
from itertools import chain

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.data.curriculum import PromptCurriculum
from rl4llm.data.prompts import PromptStream


def stream(num_rows=40, batch_size=6, least=0.2, **options):
    return PromptCurriculum(num_rows, batch_size, name_of="p{}".format, least=least, seed=3, **options)


def results(rows, step=0):
    """Return what the rows' groups of 8 earned; a third each is solved, hopeless and between."""
    return {f"p{row}": ((8, 0, 2 + (row + step) % 4)[row % 3], 8) for row in set(rows)}


def test_prompts_without_a_result_are_drawn_like_any_others():
    assert stream().next_batch(100) == PromptStream(40, 6, seed=3).next_batch(100)


def test_a_prompt_is_drawn_in_its_share_of_the_epochs():
    prompts, rates = stream(least=0.1), {"p0": 0, "p1": 8, "p2": 1, "p3": 2, "p4": 4}
    prompts.observe({name: (succeeded, 8) for name, succeeded in rates.items()})
    epochs, counts = 1500, Counter()
    while prompts.epoch < epochs:
        counts.update(prompts.next_batch(50))
    for row, share in enumerate((0.1, 0.1, 0.4375, 0.75, 1.0)):
        assert counts[row] / epochs == pytest.approx(
            share, abs=4 * (share * (1 - share) / epochs) ** 0.5 + 2e-3
        )
    assert counts[5] == pytest.approx(epochs, abs=1)


def test_the_latest_group_decides():
    prompts = stream(num_rows=2, least=1e-3, shuffle=False)
    prompts.observe({"p0": (8, 8)})
    assert prompts.next_batch(8) == [1] * 8
    prompts.observe({"p0": (4, 8), "p1": (0, 8)})
    assert prompts.next_batch(8) == [0] * 8


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_draws_the_same_prompts(world_size):
    alone = stream(batch_size=6)
    shared = [
        stream(batch_size=6 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for step, total in enumerate((None, 7, 0, 12, None, 40, None)):
        rows = alone.next_batch(total)
        assert list(chain(*(prompts.next_batch(total) for prompts in shared))) == rows
        for prompts in (alone, *shared):
            prompts.observe(results(rows, step))
    assert [prompts.state() for prompts in shared] == [alone.state()] * world_size


def test_a_resumed_curriculum_of_prompts_continues_exactly():
    whole, cut, rows = stream(), stream(), []
    for prompts, steps in ((whole, 30), (cut, 11)):
        for step in range(steps):
            rows.append(prompts.next_batch())
            prompts.observe(results(rows[-1], step))
    resumed = stream()
    resumed.restore(json.loads(json.dumps(cut.state())))
    for step in range(11, 30):
        assert resumed.next_batch() == rows[step]
        resumed.observe(results(rows[step], step))
    assert resumed.state() == whole.state()


def test_a_cursor_is_not_changed_by_later_results():
    prompts = stream()
    prompts.observe(results(range(40)))
    cursor, rows = prompts.state(), prompts.next_batch(30)
    prompts.observe(dict.fromkeys(results(range(40)), (4, 8)))
    prompts.restore(cursor)
    assert prompts.next_batch(30) == rows


def test_a_draw_costs_the_same_in_a_large_dataset():
    places = {}
    for num_rows in (300, 30_000):
        prompts = stream(num_rows=num_rows, least=0.1)
        prompts.observe({f"p{row}": (0, 8) for row in range(num_rows)})
        prompts.next_batch(2000)
        places[num_rows] = prompts.state()["consumed"]
        assert prompts.metrics()["curriculum/skipped"] == pytest.approx(0.9, abs=0.02)
    assert places[300] == pytest.approx(places[30_000], rel=0.1)


@pytest.mark.parametrize("least", [0, -0.1, 1.5, "a", None])
def test_a_least_share_outside_its_range_is_refused(least):
    with pytest.raises(ConfigError):
        stream(least=least)
