"""A curriculum over pools of one dataset: draws follow success, no pool starves, ranks and resumes change nothing."""

import json
from collections import Counter

import pytest

from rl4llm.compose.data import prompts_of
from rl4llm.compose.setup import Setup
from rl4llm.config import load_config
from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.data.mixture import MixedPrompts, pools
from rl4llm.data.prompts import PromptStream

LEVELS = ("easy", "hard", "middle", "hard")  # interleaved, and half of the rows are hard
ROWS = [{"level": LEVELS[number % 4]} for number in range(48)]
CONFIG = {"model.path": "m", "data.path": "d", "rollout.prompts": 8, "seed": 5}


def pooled(**given):
    return prompts_of(Setup.of(load_config(overrides={**CONFIG, "curriculum": "level", **given})), {"": ROWS})


def on_rank(rank, world_size, batch_size):
    rows = pools(ROWS, "level")
    streams = {name: PromptStream(len(own), 1, seed=1) for name, own in rows.items()}
    sizes = {name: len(own) for name, own in rows.items()}
    ranks = {"rank": rank, "world_size": world_size}
    return MixedPrompts(streams, sizes, batch_size=batch_size, curriculum=0.1, rows=rows, **ranks)


def drawn(prompts, total):
    return Counter(ROWS[row]["level"] for row in prompts.next_batch(total))


def test_pools_are_the_values_of_a_column():
    found = pools(ROWS, "level")
    assert list(found) == ["easy", "hard", "middle"]
    assert sorted(row for rows in found.values() for row in rows) == list(range(48))
    assert all(ROWS[row]["level"] == name for name, rows in found.items() for row in rows)
    assert pools([{"level": "Level 5"}, {"level": 3}, {"level": "a/b"}], "level") == {
        "3": [1],
        "Level_5": [0],
        "a_b": [2],
    }


def test_before_the_first_success_rows_are_drawn_alike():
    assert drawn(pooled(), 16) == {"easy": 4, "hard": 8, "middle": 4}
    assert sorted(pooled().next_batch(48)) == list(range(48))


def test_draws_follow_success_and_no_pool_starves():
    prompts = pooled()
    for _ in range(40):
        prompts.observe({"easy": (8, 8), "middle": (4, 8), "hard": (0, 16)})
    counted = {"easy": 0.1 * 12, "middle": 1.0 * 12, "hard": 0.1 * 24}  # share of the rows times 4 p (1 - p)
    total = sum(counted.values())
    assert prompts.shares == pytest.approx({name: weight / total for name, weight in counted.items()})
    found = drawn(prompts, 390)
    assert found == {"easy": 30, "middle": 300, "hard": 60}
    for _ in range(40):  # what was out of reach comes within it
        prompts.observe({"middle": (8, 8), "hard": (8, 16)})
    assert drawn(prompts, 390)["hard"] > 340


def test_a_step_without_episodes_of_a_pool_keeps_its_rate():
    prompts = pooled()
    prompts.observe({"easy": (2, 8), "middle": (0, 0), "hard": (0, 0)})
    before = prompts.metrics()
    prompts.observe({"easy": (0, 0), "middle": (0, 0), "hard": (0, 0)})
    assert prompts.metrics() == before
    assert {name for name in before if name.endswith("/success")} == {"part/easy/success"}


def test_a_resumed_curriculum_continues_with_the_same_rows():
    whole, cut, rows = pooled(), pooled(), []
    for prompts, steps in ((whole, 20), (cut, 7)):
        for step in range(steps):
            rows.append(prompts.next_batch())
            prompts.observe({"easy": (step % 9, 8), "middle": (1, 8), "hard": (0, 8)})
    resumed = pooled()
    resumed.restore(json.loads(json.dumps(cut.state())))
    for step in range(7, 20):
        assert resumed.next_batch() == rows[step]
        resumed.observe({"easy": (step % 9, 8), "middle": (1, 8), "hard": (0, 8)})
    assert resumed.state() == whole.state()
    with pytest.raises(CheckpointError):
        pooled(seed=6).restore(cut.state())


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_draws_the_same_rows(world_size):
    whole = on_rank(0, 1, 6)
    shared = [on_rank(rank, world_size, 6 // world_size) for rank in range(world_size)]
    for step in range(12):
        expected = whole.next_batch()
        assert [row for prompts in shared for row in prompts.next_batch()] == expected
        for prompts in (whole, *shared):
            prompts.observe({"easy": (step, 12), "middle": (0, 6), "hard": (3, 6)})
    assert all(prompts.state() == whole.state() for prompts in shared)


def test_without_a_curriculum_pools_change_no_draw():
    prompts = pooled(curriculum=None)
    assert isinstance(prompts, PromptStream)
    assert prompts.next_batch(96) == PromptStream(48, 8, seed=5).next_batch(96)
    assert prompts.watched == ""


@pytest.mark.parametrize("column", ["levl", "id"])
def test_a_column_that_names_no_pools_is_refused(column):
    with pytest.raises(ConfigError):
        pools([{"level": "easy", "id": number} for number in range(65)], column)


def test_a_curriculum_requires_something_to_weigh():
    with pytest.raises(ConfigError):
        prompts_of(Setup.of(load_config(overrides={**CONFIG, "curriculum": 0})), {"": ROWS})
    parts = {"a": {"data": {"path": "arithmetic"}}}
    with pytest.raises(ConfigError):
        load_config(overrides={"model.path": "m", "parts": parts, "curriculum": "level"})
