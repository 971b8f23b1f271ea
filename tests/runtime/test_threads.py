"""Blocking work starts at once in a separate thread, which is then reused; nothing waits for one that hangs."""

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from rl4llm.runtime import threads
from rl4llm.runtime.threads import in_own_thread

SEEN = contextvars.ContextVar("SEEN", default="nothing")


def together(*works):
    async def run():
        return await asyncio.gather(*(in_own_thread("rl4llm-test", work) for work in works))

    return asyncio.run(run())


def one_by_one(*works):
    return [together(work)[0] for work in works]


def test_sequential_work_reuses_one_thread_under_its_own_name():
    found = one_by_one(*[threading.current_thread] * 5)
    assert len(set(found)) == 1 and found[0].name == "rl4llm-test" and found[0].daemon


def test_concurrent_work_gets_threads_and_only_some_are_kept():
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


def test_a_thread_of_cancelled_work_is_reused_when_it_ends():
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
def test_an_error_in_a_thread_is_raised_where_it_is_awaited(error):
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


def test_an_idle_thread_keeps_nothing_of_its_work_alive():
    class Thing:
        pass

    thing = Thing()
    found = weakref.ref(thing)
    assert together(lambda thing=thing: thing) == [thing]
    del thing
    gc.collect()
    assert found() is None


def test_a_forked_process_does_not_use_its_parents_threads():
    assert together(lambda: 1) == [1] and threads._waiting
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # what hangs here is not waited for
        os._exit(together(lambda: 7)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


TEAMS = """
import asyncio, os, torch
from rl4llm.runtime.runner import Runner
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
work = lambda: torch.ones(1 << 20).exp_()
async def works():
    work()
    return count()
work()
with Runner() as runner:
    before = count()
    print(runner.run(works()) - before)  # the team of the loop's thread replaced that of this thread
    while count() > before - 2:  # that of the loop's thread ends as well
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP")
def test_a_thread_that_waits_keeps_no_openmp_team():
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
