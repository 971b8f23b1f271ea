"""A deadline ends work that waits, whatever it waits for, and costs work that never waits no timer."""

import asyncio
import time

import pytest

from rl4llm.runtime.threads import LateError, within


class Clock:
    """Counts the timers that the running loop is asked for."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.timers, call_at = 0, loop.call_at

        def counted(*args, **kwargs):
            self.timers += 1
            return call_at(*args, **kwargs)

        loop.call_at = counted


async def answered(value, *waits):
    for wait in waits:
        await wait
    return value


def test_only_work_that_waits_has_a_timer():
    async def run():
        clock = Clock()
        never_waited, timers = await within(60, answered(1)), clock.timers
        waited = await within(
            60, answered(2, asyncio.sleep(0), asyncio.sleep(0.001), asyncio.gather(answered(3)))
        )
        return never_waited, timers, waited, await within(None, answered(4, asyncio.sleep(0.001)))

    assert asyncio.run(run()) == (1, 0, 2, 4)


@pytest.mark.parametrize("begin", [[], [0], [0, 0.005, 0]])
def test_what_waits_too_long_is_cancelled_where_it_waits(begin):
    cancelled = []

    async def hang():
        for seconds in begin:
            await asyncio.sleep(seconds)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(asyncio.current_task())
            raise

    async def run():
        with pytest.raises(LateError):
            await within(0.05, hang())
        assert cancelled == [asyncio.current_task()] and not asyncio.current_task().cancelling()

    asyncio.run(run())


def test_the_deadline_counts_from_the_start():
    async def run():
        loop = asyncio.get_running_loop()

        async def blocks_and_waits():
            time.sleep(1.0)
            waits_since.append(loop.time())
            await asyncio.sleep(60)

        waits_since = []
        with pytest.raises(LateError):
            await within(1.0, blocks_and_waits())
        assert loop.time() - waits_since[0] < 0.9

    asyncio.run(run())


@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("no"), SystemExit(3)])
def test_errors_of_the_work_are_its_own(error, waits):
    async def breaks():
        for _ in range(waits):
            await asyncio.sleep(0)
        raise error

    async def run():
        with pytest.raises(type(error)) as raised:
            await within(60, breaks())
        assert raised.value is error

    asyncio.run(run())


def test_what_breaks_when_it_is_cancelled_was_late():
    async def breaks():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("cancelled") from None

    async def run():
        with pytest.raises(LateError) as late:
            await within(0.01, breaks())
        assert isinstance(late.value.__cause__, ValueError)

    asyncio.run(run())


def test_deadlines_stand_in_each_other():
    async def run():
        async def inner(seconds):
            with pytest.raises(LateError):
                await within(seconds, asyncio.sleep(60))
            return "inner"

        assert await within(60, inner(0.01)) == "inner"
        with pytest.raises(LateError):
            await within(0.01, within_alone(60))

    async def within_alone(seconds):
        await within(seconds, answered(1, asyncio.sleep(60)))

    asyncio.run(run())


def test_a_cancellation_from_outside_is_none_of_the_deadline():
    async def run():
        closed = asyncio.Event()

        async def waits():
            try:
                await asyncio.sleep(60)
            finally:
                closed.set()

        async def timed():
            await within(60, waits())

        task = asyncio.create_task(timed())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed.is_set() and task.cancelled()

    asyncio.run(run())
