import time

import pytest

from rl4llm.runtime.ranks import Ranks
from rl4llm.tracking.waiting import Waiting


class One(Ranks):
    """Stand for one rank of three."""

    size = 3

    def __init__(self, rank, waits=False):
        self.rank, self.waits = rank, waits


@pytest.fixture
def three(tmp_path):
    waiting = [Waiting(tmp_path, One(rank, waits=rank == 0), slow_s=0.2) for rank in range(3)]
    for one in waiting:
        one.start()
    yield waiting
    for one in waiting:
        one.stop()


def until(lines, expected):
    deadline = time.monotonic() + 30
    while (found := lines()) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def test_a_slow_phase_shows_where_each_rank_is(tmp_path, three):
    first, second, third = three
    for one in three:
        one.phase("rollout")
    assert first.lines() == []
    first.phase("prepare")  # which waits for the others
    third.phase("rollout")
    moment = lambda: [line.partition(",")[0] for line in first.lines()]  # noqa: E731
    slow = ["rank 0 waits for the others in prepare", "rank 1 is in rollout", "rank 2 is in rollout"]
    until(moment, slow)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        second.phase("prepare")  # it is running again
        time.sleep(0.05)
    assert moment()[1] == "rank 1 is running"
    first.phase("update")
    assert first.lines() == []
    for one in three:
        one.stop()
    assert not list(tmp_path.glob(".waiting-*"))


def test_one_process_logs_long_waits_at_growing_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr("rl4llm.tracking.waiting.FIRST_LINE_S", 0.1)
    said = []
    waiting = Waiting(tmp_path, Ranks(), said.append, slow_s=0.05)
    waiting.start()
    waiting.phase("rollout")
    until(lambda: len(said), 3)
    assert waiting.lines() == []
    waiting.stop()
    assert all(text.startswith("still in rollout after 0:0") for text in said)
    assert time.time() - waiting._since >= 0.4  # 0.1, 0.2, 0.4
