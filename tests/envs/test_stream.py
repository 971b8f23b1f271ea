"""The source of groups: which draws it plays when, in which order it hands them over, and what a resumed run repeats."""

import asyncio
import json
import random
from collections import Counter
from concurrent.futures import Future

import pytest

from rl4llm.data.mixture import MixedPrompts
from rl4llm.data.prompts import PromptStream
from rl4llm.envs.stream import GroupStream
from rl4llm.runtime.runner import Runner

ROWS, SHARE, STEPS = 7, 3, 12


class Unit:
    """An episode that takes `turns` turns of random length, and notes which version of the weights each begins with."""

    def __init__(self, engine, draw, rollout):
        self.engine, self.draw, self.rollout = engine, draw, rollout
        self.versions, self.outcome = [], Future()

    async def announce(self):
        assert not self.versions
        self.engine.begun.append(self.draw)

    async def play(self):
        for _ in range(self.engine.random.randrange(1, 4)):
            self.versions.append(self.engine.version)
            for _ in range(self.engine.random.choice([0, 0, 1, 30])):
                await asyncio.sleep(0)
        self.outcome.set_result(None)


class Engine:
    """Plays units, and counts what it began."""

    plays_whole, group_size = False, 2

    def __init__(self, seed):
        self.random, self.version, self.begun = random.Random(seed), 0, []

    def begin(self, rows, *, step, first_index, earlier, **how):
        seen, units = Counter(earlier), []
        if self.plays_whole:
            return [Unit(self, (step, first_index, *rows), self)]
        for row in rows:
            units.append(Unit(self, (step, first_index, row, seen[row]), self))
            seen[row] += 1
        return units


class Whole(Engine):
    """Plays all rows together, as the interaction loop of a user does."""

    plays_whole = True


def prompts_of(kind, rank=0, world_size=1):
    own = {"rank": rank, "world_size": world_size}
    if kind != "mixture":
        return PromptStream(ROWS, SHARE, seed=1, **own)
    parts = {"a": PromptStream(4, 1), "b": PromptStream(3, 1)}
    return MixedPrompts(parts, {"a": 1, "b": 2}, batch_size=SHARE, **own)


def stream_of(runner, engine, prompts):
    return GroupStream(engine, prompts, runner, dict)


def train(engine, stream, steps, staleness, *, step=0, last=STEPS, refills=lambda step: 0, share=SHARE):
    """Take steps of a run as a trainer does, which publishes after each; return the draws that each step trains."""
    trained = []
    for now in range(step, step + steps):
        engine.version = now
        while (missing := share * min(staleness + 1, last - now) - stream.left) > 0:
            stream.admit(min(missing, share))
        units = stream.take(share)[1] + (stream.take(refills(now))[1] if refills(now) else [])
        for unit in units:
            assert unit.outcome.done()
            assert all(now - staleness <= version <= now for version in unit.versions)
        trained.append([unit.draw for unit in units])
    return trained


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_older_than_the_bound(seed, staleness):
    choose = random.Random(seed)
    refills = Counter({step: choose.randrange(0, 5) for step in range(STEPS)})
    with Runner() as runner:
        engine = Engine(seed)
        stream = stream_of(runner, engine, prompts_of("stream"))
        trained = train(engine, stream, STEPS, staleness, refills=refills.__getitem__)
        stream.close()
    draws = [draw for step in trained for draw in step]
    assert len(draws) == len(set(draws))  # none twice
    assert len(draws) == STEPS * SHARE + refills.total()
    assert draws == engine.begun  # in the order in which they were drawn, and none is lost


@pytest.mark.parametrize("kind", ["stream", "mixture", "whole"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_run_trains_what_the_other_would(kind, staleness):
    engine_of = Whole if kind == "whole" else Engine
    how = {"last": 8, "refills": lambda step: {1: 2, 3: 4, 5: 1, 6: 2, 7: 1}.get(step, 0)}
    with Runner() as runner:
        engine = engine_of(0)
        whole = train(engine, stream_of(runner, engine, prompts_of(kind)), 8, staleness, **how)
        for killed in range(1, 8):
            first = engine_of(killed)
            stream = stream_of(runner, first, prompts_of(kind))
            begin = train(first, stream, killed, staleness, **how)
            state = json.loads(json.dumps(stream.state()))
            again = engine_of(killed + 10)
            resumed = stream_of(runner, again, prompts_of(kind))
            resumed.restore(state)
            assert resumed.left == stream.left and not again.begun  # the engines have no weights yet
            assert begin + train(again, resumed, 8 - killed, staleness, step=killed, **how) == whole


@pytest.mark.parametrize("kind", ["stream", "mixture"])
def test_any_number_of_ranks_plays_the_same_draws(kind):
    def steps_of(world_size):
        with Runner() as runner:
            found = []
            for rank in range(world_size):
                engine = Engine(rank)
                prompts = prompts_of(kind, rank, world_size)
                prompts.batch_size = 6 // world_size
                stream = stream_of(runner, engine, prompts)
                found.append(train(engine, stream, 5, 1, refills=lambda step: step % 3, share=6))
                stream.close()
            return [[draw for own in found for draw in own[step]] for step in range(5)]

    alone = steps_of(1)
    for size in (2, 3):
        assert [sorted(step) for step in steps_of(size)] == [sorted(step) for step in alone]


def test_an_interruption_in_the_loop_ends_the_wait_for_it():
    class Interrupts(Unit):
        async def play(self):
            raise KeyboardInterrupt

    with Runner() as runner:
        engine = Engine(0)
        engine.begin = lambda rows, **how: [Interrupts(engine, (0, 0, row, 0), engine) for row in rows]
        with pytest.raises(KeyboardInterrupt):
            stream_of(runner, engine, prompts_of("stream")).take(SHARE)


def test_the_first_error_of_a_round_reaches_who_takes_it():
    class Breaks(Unit):
        async def play(self):
            if self.draw[2] == 2:
                raise OSError("no more")
            await asyncio.sleep(3600)

    with Runner() as runner:
        engine = Engine(0)
        engine.begin = lambda rows, **how: [Breaks(engine, (0, 0, row, 0), engine) for row in range(3)]
        with pytest.raises(OSError):
            stream_of(runner, engine, prompts_of("stream")).take(SHARE)


def test_a_loop_of_a_user_gets_whole_rounds():
    with Runner() as runner:
        engine = Whole(0)
        stream = stream_of(runner, engine, prompts_of("whole"))
        stream.admit(SHARE)
        stream.admit(SHARE)
        first, second = stream.take(SHARE), stream.take(2)
        assert [len(units) for _, units in (first, second)] == [1, 1]
        # A refill is a round, which begins at once.
        assert len(second[0]) == 2 and stream.left == SHARE


def test_what_still_plays_ends_with_the_stream():
    class Endless(Unit):
        async def play(self):
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(self)

    ended = []
    with Runner() as runner:
        engine = Engine(0)
        engine.begin = lambda rows, **how: [Endless(engine, (row,), engine) for row in rows]
        stream = stream_of(runner, engine, prompts_of("stream"))
        stream.admit(SHARE)
        runner.run(asyncio.sleep(0.01))
        assert stream.close() and len(ended) == SHARE
        assert stream.left == SHARE  # which a checkpoint would play again
