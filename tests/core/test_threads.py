"""Blocking work starts at once in a thread of its own, which then does other work; nothing waits for one that hangs."""

import asyncio
import contextvars
import gc
import os
import signal
import threading
import weakref

import pytest

from rl4llm.core import threads
from rl4llm.core.threads import in_own_thread

SEEN = contextvars.ContextVar("SEEN", default="nothing")


def together(*works):
    async def run():
        return await asyncio.gather(*(in_own_thread("rl4llm-test", work) for work in works))

    return asyncio.run(run())


def one_by_one(*works):
    return [together(work)[0] for work in works]


def test_one_work_after_the_other_takes_one_thread_and_its_name_is_that_of_the_work():
    found = one_by_one(*[threading.current_thread] * 5)
    assert len(set(found)) == 1 and found[0].name == "rl4llm-test" and found[0].daemon


def test_what_works_at_once_has_each_a_thread_and_only_some_are_kept():
    many = 2 * threads.KEPT
    everyone = threading.Barrier(many, timeout=60)
    assert sorted(together(*[everyone.wait] * many)) == list(range(many))
    assert len(threads._waiting) < many
    assert together(lambda: "more") == ["more"]


def test_a_work_that_hangs_holds_up_no_other():
    released = threading.Event()

    async def run():
        hanging = asyncio.create_task(in_own_thread("rl4llm-test", released.wait))
        await asyncio.sleep(0)
        others = [await in_own_thread("rl4llm-test", threading.get_ident) for _ in range(20)]
        released.set()
        return others, await hanging

    others, hung = asyncio.run(run())
    assert hung and len(others) == 20


def test_a_work_that_was_given_up_gets_its_thread_back_when_it_ends():
    released = threading.Event()

    async def given_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_own_thread("rl4llm-test", released.wait), 0.01)
        waiting = len(threads._waiting)
        released.set()
        while len(threads._waiting) == waiting:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(given_up(), 60))
    assert together(lambda: 1) == [1]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_work_raises_is_raised_where_it_is_waited_for_and_its_thread_goes_on(error):
    def breaks():
        raise error

    async def run():
        before = await in_own_thread("rl4llm-test", threading.get_ident)
        try:
            await in_own_thread("rl4llm-test", breaks)
        except BaseException as raised:  # noqa: BLE001 - it must not end the test's event loop
            return raised, before, await in_own_thread("rl4llm-test", threading.get_ident)

    raised, before, after = asyncio.run(run())
    assert raised is error and before == after


def test_a_work_sees_no_context_of_the_one_before():
    def sets():
        SEEN.set("something")
        return SEEN.get()

    assert one_by_one(sets, SEEN.get) == ["something", "nothing"]


def test_a_thread_that_waits_keeps_nothing_of_its_last_work_alive():
    class Thing:
        pass

    thing = Thing()
    found = weakref.ref(thing)
    assert together(lambda thing=thing: thing) == [thing]
    del thing
    gc.collect()
    assert found() is None


def test_work_in_a_forked_process_is_not_left_to_threads_that_only_the_parent_has():
    assert together(lambda: 1) == [1] and threads._waiting
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # what hangs here is not waited for
        os._exit(together(lambda: 7)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
