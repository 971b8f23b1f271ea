"""Coroutines run in an event loop of another thread, so that whoever waits for them may be in an event loop too."""

import asyncio
import contextvars
import inspect
import os
import signal
import sqlite3
import threading
import traceback

import pytest
import torch

from rl4llm.runtime import runner as module
from rl4llm.runtime.runner import Runner, all_together, awaited, in_caller, run

SEEN = contextvars.ContextVar("SEEN", default="nothing")
WAIT_S = 30.0


async def answer():
    await asyncio.sleep(0)
    return 42


async def interrupted(wait):
    """Interrupt the main thread, perhaps before it waits, and wait."""
    os.kill(os.getpid(), signal.SIGINT)
    await wait()


@pytest.fixture
def runner():
    with Runner() as runner:
        yield runner


@pytest.mark.parametrize("call", [run, lambda it: awaited([it])[0], lambda it: all_together([it])[0]])
def test_a_coroutine_runs_inside_and_outside_an_event_loop(call):
    async def notebook():
        return call(answer())

    assert call(answer()) == asyncio.run(notebook()) == 42


def test_all_coroutines_share_a_thread(runner):
    kept = {}

    async def counted():
        db = kept.setdefault("db", None) or sqlite3.connect(":memory:")  # refuses any other thread
        kept["db"] = db
        return db.execute("select 1").fetchone(), threading.current_thread()

    (one, first), (two, second) = runner.run(counted()), runner.run(counted())
    assert one == two == (1,) and first is second is not threading.main_thread()


def test_a_coroutine_sees_what_surrounds_its_caller(runner):
    async def seen():
        return SEEN.get(), torch.is_grad_enabled()

    SEEN.set("something")
    assert runner.run(seen()) == ("something", False)
    SEEN.set("nothing")
    assert runner.run(seen()) == ("nothing", False)


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("late"), SystemExit(3)])
def test_an_error_keeps_the_line_that_raised_it(runner, error):
    async def fails():
        raise error  # this line

    with pytest.raises(type(error)) as caught:
        runner.run(fails())
    assert "raise error  # this line" in "".join(traceback.format_exception(caught.value))
    assert runner.run(answer()) == 42


def test_a_coroutine_cannot_wait_for_its_own_loop(runner):
    async def nested():
        runner.run(answer())

    with pytest.raises(RuntimeError, match="await the coroutine"):
        runner.run(nested())


def test_the_loop_stands_still_between_two_coroutines(runner):
    ticks = []

    async def tick():
        while True:
            ticks.append(0)
            await asyncio.sleep(0)

    async def start():
        ticks.append(asyncio.create_task(tick()))
        await asyncio.sleep(0)

    runner.run(start())
    before = len(ticks)
    assert run(answer()) == 42 and len(ticks) == before
    runner.run(answer())
    assert len(ticks) > before


def test_an_interrupt_lets_a_coroutine_clean_up(runner):
    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted(waits))
    assert ended and runner.run(answer()) == 42


def test_a_coroutine_that_hangs_cannot_hold_up_an_interrupt(runner, monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.01)
    released = threading.Event()

    async def hangs():
        released.wait(WAIT_S)

    for coroutine in (interrupted(hangs), answer()):  # what cleans up afterwards does not wait for it either
        with pytest.raises(KeyboardInterrupt):
            runner.run(coroutine)
        assert inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED
    runner.close()
    released.set()


def test_another_thread_cancels_the_coroutine_that_runs(runner):
    async def waits():
        threading.Thread(target=runner.cancel).start()
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        runner.run(waits())
    assert runner.run(answer()) == 42


def test_the_waiting_thread_calls_what_only_it_may_call(runner):
    def work():
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return threading.current_thread()

    def fails():
        raise TimeoutError("late")

    async def both():
        with pytest.raises(TimeoutError, match="late"):
            await in_caller(fails)
        return await asyncio.gather(in_caller(work), answer())

    assert runner.run(both()) == [threading.main_thread(), 42]
