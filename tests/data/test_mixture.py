"""Which part is next: in proportion to weights, the same for any number of ranks, resumable, and led by success."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from rl4llm.compose.data import prompts_of
from rl4llm.config import load_config
from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.data.mixture import MixedPrompts
from rl4llm.data.prompts import PromptStream

SIZES = {"sums": 10, "tools": 7, "puzzles": 100}
WEIGHTS = {"sums": 3, "tools": 1, "puzzles": 1.5}


def mixed(weights=WEIGHTS, *, batch_size=4, rank=0, world_size=1, seed=1, curriculum=None, sizes=SIZES):
    streams = {name: PromptStream(size, 1, seed=seed) for name, size in sizes.items()}
    return MixedPrompts(
        streams, weights, batch_size=batch_size, rank=rank, world_size=world_size, curriculum=curriculum
    )


def part_of(row, sizes=SIZES):
    for name, size in sizes.items():
        if row < size:
            return name
        row -= size
    raise AssertionError(row)


def test_a_variable_may_say_whether_a_part_is_shuffled(monkeypatch):
    monkeypatch.setenv("SHUFFLE", "false")
    parts = {"a": {"data": {"shuffle": "${oc.env:SHUFFLE}"}}, "b": {}}
    config = load_config(overrides={"model.path": "m", "parts": parts, "rollout.prompts": 16})
    setup = SimpleNamespace(config=config, machine=SimpleNamespace(ranks=SimpleNamespace(rank=0, size=1)))
    rows = prompts_of(setup, {"a": range(8), "b": range(8)}).next_batch()
    assert [row for row in rows if row < 8] == list(range(8))
    assert [row for row in rows if row >= 8] != list(range(8, 16))


def test_each_part_always_has_its_share_to_within_one():
    prompts, counts = mixed(), Counter()
    total = sum(WEIGHTS.values())
    for number, row in enumerate((row for _ in range(100) for row in prompts.next_batch()), 1):
        counts[part_of(row)] += 1
        assert all(
            abs(counts[name] - number * weight / total) < 1 + 1e-9 for name, weight in WEIGHTS.items()
        ), number


def test_only_the_ratio_of_weights_counts():
    assert mixed().next_batch(40) == mixed({name: 7 * weight for name, weight in WEIGHTS.items()}).next_batch(
        40
    )
    alone = mixed({"sums": 5}, sizes={"sums": 10})
    assert alone.next_batch(25) == PromptStream(10, 1, seed=1).next_batch(25)


def test_every_row_of_a_part_comes_once_in_an_epoch_of_that_part():
    rows = mixed().next_batch(55)
    # 30 of 55 places are three epochs of 10
    assert sorted(row for row in rows if row < 10)[::3] == list(range(10))
    assert Counter(row for row in rows if 10 <= row < 17).most_common(1)[0][1] <= 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_plays_the_same_prompts_in_order(world_size):
    whole = mixed(batch_size=6, curriculum=0.1)
    each = {"batch_size": 6 // world_size, "world_size": world_size, "curriculum": 0.1}
    shared = [mixed(rank=rank, **each) for rank in range(world_size)]
    for step in range(12):
        total = 5 if step % 3 == 2 else None  # in place of groups that taught nothing
        rows = [prompts.next_batch(total) for prompts in shared]
        expected = whole.next_batch(total)
        assert [row for own in rows for row in own] == expected
        assert shared[-1].earlier == Counter(row for own in rows[:-1] for row in own)
        for prompts in (whole, *shared):
            prompts.observe({"sums": (step, 12), "tools": (0, 3)})
        assert all(prompts.state() == whole.state() for prompts in shared)


def test_a_resumed_mixture_continues_with_its_curriculum():
    whole, cut = mixed(curriculum=0.2), mixed(curriculum=0.2)
    rows = []
    for prompts, steps in ((whole, 30), (cut, 13)):
        for step in range(steps):
            rows.append(prompts.next_batch())
            prompts.observe({"sums": (step % 5, 5), "puzzles": (1, 2)})
    resumed = mixed(curriculum=0.2)
    resumed.restore(json.loads(json.dumps(cut.state())))
    for step in range(13, 30):
        assert resumed.next_batch() == rows[step]
        resumed.observe({"sums": (step % 5, 5), "puzzles": (1, 2)})
    assert resumed.state() == whole.state()


def test_the_curriculum_is_its_formula():
    prompts = mixed({"sums": 1, "tools": 1, "puzzles": 2}, curriculum=0.1)
    assert prompts.shares == {"sums": 0.25, "tools": 0.25, "puzzles": 0.5}  # nothing is known yet
    prompts.observe({"sums": (4, 8), "tools": (8, 8), "puzzles": (0, 0)})
    assert prompts.shares == pytest.approx({"sums": 1 / 3.1, "tools": 0.1 / 3.1, "puzzles": 2 / 3.1})
    prompts.observe({"sums": (0, 8), "tools": (0, 8)})  # rates are now 0.4 and 0.8
    factors = {"sums": 4 * 0.4 * 0.6, "tools": 4 * 0.8 * 0.2, "puzzles": 2.0}
    total = sum(factors.values())
    assert prompts.shares == pytest.approx({name: factor / total for name, factor in factors.items()})
    assert prompts.metrics()["part/sums/success"] == pytest.approx(0.4)


def test_the_curriculum_prefers_half_solved_and_forgotten_parts():
    prompts = mixed({"sums": 1, "puzzles": 1}, curriculum=0.1, sizes={"sums": 10, "puzzles": 100})
    for _ in range(30):
        prompts.observe({"sums": (10, 10), "puzzles": (5, 10)})
    assert Counter(row < 10 for row in prompts.next_batch(110)) == {False: 100, True: 10}
    for _ in range(30):
        prompts.observe({"sums": (5, 10)})
    assert 54 <= sum(row < 10 for row in prompts.next_batch(110)) <= 56


def test_without_a_curriculum_nothing_is_watched():
    assert mixed().watched == ""
    assert mixed(curriculum=1.0).watched == "part"


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "2"])
def test_a_weight_or_curriculum_outside_its_range_is_refused(value):
    with pytest.raises(ConfigError):
        mixed({**WEIGHTS, "tools": value})
    with pytest.raises(ConfigError):
        mixed(curriculum=value)


def test_a_state_of_other_parts_is_refused():
    state = json.loads(json.dumps(mixed(curriculum=0.5).state()))
    other = mixed({"sums": 1, "words": 1}, sizes={"sums": 10, "words": 3})
    with pytest.raises(CheckpointError):
        other.restore(state)
    with pytest.raises(CheckpointError):
        other.restore(PromptStream(10, 1).state())
    with pytest.raises(CheckpointError):
        mixed(sizes={**SIZES, "tools": 8}).restore(state)
