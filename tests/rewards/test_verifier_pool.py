"""The verifier pool: what hangs, dies or is killed costs its own result and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.rewards import pool as pool_module
from rl4llm.rewards.fork_server import ForkServer
from rl4llm.rewards.pool import Crash, RewardFailure, Timeout, Unavailable, VerifierPool

FUNCTIONS = """
import os, signal, sys, time

def note(what):
    with open(__file__ + "." + what, "a") as file:
        file.write(what)

note("import")

def act(what, value=0):
    if what == "sleep":
        note("sleep")
        time.sleep(value)
    elif what == "burn":
        9 ** 9 ** 9
    elif what == "burn_and_die":
        while time.process_time() < value:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "yield":
        if os.path.exists(value):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        started = time.process_time()
        while time.process_time() < started + 0.05:
            pass
    elif what == "eat":
        return len(bytearray(value))
    elif what == "die":
        os.kill(os.getpid(), value)
    elif what == "die_once":
        if not os.path.exists(value):
            open(value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise ValueError("cannot read this")
    elif what == "print":
        print("noise")
        sys.stderr.write("noise" * 100_000)
    elif what == "long":
        return "x" * value
    elif what == "object":
        return object()
    elif what == "environment":
        return dict(os.environ)
    elif what == "length":
        return len(value)
    return value
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that runs much else gives a task that burns its time in small parts."""
    monkeypatch.setattr(pool_module, "PATIENCE", 40)


@pytest.fixture
def entry(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:act"


@pytest.fixture
def pool(entry):
    pool = VerifierPool(entry, workers=2, timeout_s=30.0)
    yield pool
    pool.close()


@pytest.fixture
def hasty_pool(entry):
    pool = VerifierPool(entry, workers=2, timeout_s=1.5)
    yield pool
    pool.close()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def children():
    return psutil.Process().children(recursive=True)


def times(entry, what):
    """Return how often a process noted that."""
    return Path(entry.replace(":act", f".{what}")).read_text().count(what)


def test_results_come_back_in_the_order_of_the_tasks(pool):
    assert pool.map([["give", n] for n in range(50)]) == list(range(50))
    assert len(pool.pids()) == 2


def test_no_process_is_started_before_it_is_needed(entry):
    pool = VerifierPool(entry)
    assert pool.pids() == [] and pool.map([]) == [] and pool.pids() == []


def test_work_is_spread_over_the_workers(pool):
    pool.warm_up()
    started = pool.counts["started"]
    assert pool.map([["sleep", 0.4]] * 2 + [["give", 1]]) == [0.4, 0.4, 1]
    assert pool.counts["started"] == started == 2


@pytest.mark.parametrize("bomb", [["sleep", 600], ["burn"]])
def test_a_task_that_hangs_times_out_without_affecting_others(hasty_pool, bomb):
    outcomes = hasty_pool.map([["give", 1], bomb, ["give", 2], ["give", 3]])
    assert outcomes == [1, Timeout("took more than 1.5 s"), 2, 3]
    assert hasty_pool.map([["give", 4]]) == [4]
    assert hasty_pool.counts["timeout"] == 1


def test_a_killed_worker_is_replaced_without_an_import(pool, entry):
    before = {child.pid for child in children()}
    for round_ in range(3):
        assert isinstance(pool.map([["die", int(signal.SIGKILL)]])[0], Crash)
        assert pool.map([["give", round_], ["give", 1]]) == [round_, 1]
    assert pool.counts["started"] > 6 and times(entry, "import") == 1
    pool.warm_up()
    expected = 1 + pool.workers + 1  # the process that forks, the workers, and one in reserve
    deadline = time.monotonic() + 20
    while (
        len(running := {child.pid for child in children()} - before) < expected
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert len(running) == expected and all(alive(pid) for pid in running)


def test_a_timeout_is_remembered_and_not_computed_again(hasty_pool, entry):
    for other in range(2):
        outcomes = hasty_pool.map([["sleep", 600], ["give", other], ["sleep", 0]])
        assert outcomes == [Timeout("took more than 1.5 s"), other, 0]
    assert times(entry, "sleep") == 3
    assert (hasty_pool.counts["timeout"], hasty_pool.counts["remembered"]) == (2, 1)


def test_the_oldest_timeouts_are_forgotten_first(entry, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_REMEMBERED", 1)
    pool = VerifierPool(entry, workers=1, timeout_s=0.5)
    for seconds in (600, 601, 601, 600):
        assert isinstance(pool.map([["sleep", seconds]])[0], Timeout)
    assert times(entry, "sleep") == 3 and pool.counts["remembered"] == 1
    pool.close()


def test_a_killed_process_that_forks_workers_is_replaced(pool, entry):
    pool.warm_up()
    before = pool.pids()
    server = psutil.Process(before[0]).parent()
    assert server.pid != os.getpid()
    server.kill()
    assert pool.map([["sleep", 0.2], ["give", 1], ["sleep", 0.2]]) == [0.2, 1, 0.2]
    assert pool.map([["die", int(signal.SIGKILL)], ["give", 2]])[1] == 2
    assert times(entry, "import") == 2 and wait_until_gone([*before, server.pid]) == []


def test_the_forking_process_found_dead_during_the_last_task(pool, entry, monkeypatch):
    pool.warm_up()
    found_dead = iter([False, True])  # at the second look every task is under way, and none waits
    monkeypatch.setattr(ForkServer, "died", property(lambda server: next(found_dead, False)))
    assert pool.map([["give", 1], ["sleep", 0.5]]) == [1, 0.5]
    assert times(entry, "import") == 2


@pytest.fixture
def busy_processor(tmp_path):
    """Create a file; while it exists, tasks "yield" to a process that keeps their processor busy."""
    code = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    marker = tmp_path / "busy"
    marker.touch()
    yield marker
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_a_task_kept_from_running_gets_more_time(entry, busy_processor):
    pool = VerifierPool(entry, workers=1, timeout_s=0.4)
    pool.warm_up()
    (pid,) = pool.pids()

    def let_run():
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(pid, os.sched_getaffinity(0))

    timer = threading.Timer(0.8, let_run)
    timer.start()
    assert pool.map([["yield", str(busy_processor)]]) == [str(busy_processor)]
    timer.join()
    assert pool.counts["started"] == 1
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_a_task_that_never_ran_is_unavailable_and_asked_again(entry, busy_processor, monkeypatch):
    pool = VerifierPool(entry, workers=1, timeout_s=0.2)
    with monkeypatch.context() as hasty:
        hasty.setattr(pool_module, "PATIENCE", 6)
        (outcome,) = pool.map([["yield", str(busy_processor)]])
    assert isinstance(outcome, Unavailable) and "processor time in" in outcome.reason
    busy_processor.unlink()
    assert pool.map([["yield", str(busy_processor)]]) == [str(busy_processor)]
    pool.close()


def test_both_attempts_at_a_task_share_one_limit(entry):
    pool = VerifierPool(entry, workers=1, timeout_s=1.0)
    assert pool.map([["burn_and_die", 0.6]]) == [Timeout("took more than 1 s")]
    pool.close()


def test_no_answer_waits_until_a_killed_worker_is_gone(entry):
    pool = VerifierPool(entry, workers=2, timeout_s=0.5)
    pool.warm_up()
    server = psutil.Process(pool.pids()[0]).parent()
    server.suspend()
    try:
        assert pool.map([["sleep", 600], ["give", 1]]) == [Timeout("took more than 0.5 s"), 1]
    finally:
        server.resume()
    pool.warm_up()
    assert psutil.Process(pool.pids()[0]).parent() == server
    pool.close()


def test_a_task_that_eats_memory_gets_no_more_than_the_limit(entry):
    pool = VerifierPool(entry, workers=1, memory_bytes=256 * 1024**2)
    (outcome,) = pool.map([["eat", 300 * 1024**2]])
    assert isinstance(outcome, Crash) and "MemoryError" in outcome.reason
    assert pool.map([["eat", 1024**2]]) == [1024**2]
    pool.close()


def test_a_task_that_always_crashes_names_the_signal(pool):
    outcomes = pool.map([["die", int(signal.SIGSEGV)], ["give", 1]])
    assert outcomes[0] == Crash("the worker process died 2 times, at last: killed by SIGSEGV")
    assert outcomes[1] == 1


def test_a_process_killed_from_outside_costs_no_result(pool, tmp_path):
    marker = str(tmp_path / "died")
    assert pool.map([["die_once", marker], ["give", 1]]) == [marker, 1]
    assert os.path.exists(marker)


def test_processes_killed_from_outside_while_idle_are_replaced(pool):
    for _ in range(5):
        pool.warm_up()
        before = pool.pids()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert pool.map([["give", n] for n in range(6)]) == list(range(6))
        assert not set(before) & set(pool.pids())
    assert not [child for child in children() if child.status() == psutil.STATUS_ZOMBIE]


def test_a_stopped_process_is_a_timeout_not_a_hang(hasty_pool):
    hasty_pool.warm_up()
    for pid in hasty_pool.pids():
        os.kill(pid, signal.SIGSTOP)
    assert [type(outcome) for outcome in hasty_pool.map([["give", 1], ["give", 2]])] == [Timeout, Timeout]
    assert hasty_pool.map([["give", 3]]) == [3]


def test_a_worker_whose_task_is_announced_late_lives_on(pool):
    pool.warm_up()
    before = pool.pids()
    late = threading.Timer(0.3, lambda: [worker.channel.send(b" ") for worker in pool._crew])
    late.start()
    assert pool.map([["sleep", 1.0]] * 2) == [1.0, 1.0]
    late.join()
    assert pool.map([["give", 1], ["give", 2]]) == [1, 2] and pool.pids() == before


def test_an_exception_is_a_result_and_needs_no_new_process(pool):
    pool.warm_up()
    before = pool.pids()
    assert pool.map([["raise"]] * 4) == [Crash("ValueError: cannot read this")] * 4
    assert pool.pids() == before


def test_what_a_verifier_prints_does_not_disturb_the_answers(pool, capfd):
    assert pool.map([["print", 1], ["give", 2]]) == [1, 2]
    assert capfd.readouterr() == ("", "")


def test_results_that_cannot_be_sent_are_crashes(pool):
    too_long, no_json, fine = pool.map([["long", 10**6], ["object"], ["long", 3]])
    assert "1000002 bytes" in too_long.reason and "not JSON serializable" in no_json.reason
    assert fine == "xxx"


def test_a_task_beyond_the_message_limit_is_refused_unsent(pool):
    refused, fine = pool.map([["length", "x" * 10**6], ["length", "x" * 60_000]])
    assert isinstance(refused, Crash) and "accepted are 65536" in refused.reason
    assert fine == 60_000


def test_text_that_is_no_valid_unicode_passes_through(pool):
    assert pool.map([["give", "\ud800 \x00 \U0001f600"]]) == ["\ud800 \x00 \U0001f600"]


def test_a_pool_answers_in_threads_and_in_an_event_loop(pool):
    answers = {}

    def ask(key):
        answers[key] = pool.map([["give", key], ["give", key + 100]])

    async def ask_in_loop():
        return pool.map([["give", -1]])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [n, n + 100] for n in range(4)}
    assert asyncio.run(ask_in_loop()) == [-1]


def test_the_thread_that_started_the_workers_may_end_before_them(pool):
    thread = threading.Thread(target=pool.warm_up)
    thread.start()
    thread.join()
    before = pool.pids()
    assert pool.map([["give", 1], ["give", 2]]) == [1, 2]
    assert pool.pids() == before


def test_an_interrupted_map_leaves_no_late_answers_for_the_next(pool):
    pool.warm_up()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.map([["sleep", 0.9]] * 20)
    assert pool.map([["give", 5]]) == [5]
    assert pool.map([["give", 6]]) == [6]


def test_ctrl_c_in_the_terminal_does_not_reach_the_workers(pool):
    pool.warm_up()
    assert all(os.getpgid(pid) != os.getpgid(0) for pid in pool.pids())


def test_a_forked_child_starts_new_workers(pool):
    pool.warm_up()
    before = pool.pids()
    answers = []
    busy = threading.Thread(target=lambda: answers.extend(pool.map([["sleep", 0.5]])))
    busy.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            right = pool.map([["give", 7]]) == [7] and not set(before) & set(pool.pids())
            pool.close()
            code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    busy.join()
    assert answers == [0.5] and pool.map([["give", 1], ["give", 2]]) == [1, 2]
    assert pool.pids() == before


def test_a_worker_that_cannot_start_reports_the_reason(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there")
    pool = VerifierPool(f"{broken}:act")
    (outcome,) = pool.map([["give", 1]])
    assert isinstance(outcome, Unavailable)
    assert "3 attempts" in outcome.reason and "No module named 'a_module_that_is_not_there'" in outcome.reason
    with pytest.raises(RewardFailure, match="a_module_that_is_not_there"):
        pool.warm_up()
    assert pool.pids() == []


def test_a_worker_that_never_gets_ready_is_unavailable(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)")
    pool = VerifierPool(f"{slow}:act", workers=1, start_timeout_s=0.3)
    (outcome,) = pool.map([["give", 1]])
    assert isinstance(outcome, Unavailable) and "not ready after 0.3 s" in outcome.reason


def test_a_pool_recovers_once_its_workers_can_start(tmp_path):
    path = tmp_path / "later.py"
    pool = VerifierPool(f"{path}:act", workers=1)
    assert isinstance(pool.map([["give", 1]])[0], Unavailable)
    path.write_text(FUNCTIONS)
    assert pool.map([["give", 1]]) == [1]
    pool.close()


def test_workers_get_no_keys_and_no_accelerator_and_hash_alike(pool, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (environment,) = pool.map([["environment"]])
    assert "secret" not in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["PYTHONHASHSEED"] == "0"


def test_a_search_path_may_hold_what_python_ignores(pool, monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    assert pool.map([["give", 2]]) == [2]


def test_close_ends_all_processes_and_reaps_them(pool):
    pool.warm_up()
    pids = pool.pids()
    pool.close()
    assert pool.pids() == [] and wait_until_gone(pids) == []
    assert not [child for child in children() if child.pid in pids]


def test_a_forgotten_pool_ends_its_processes(entry):
    pool = VerifierPool(entry)
    pool.warm_up()
    pids = pool.pids()
    del pool
    assert wait_until_gone(pids) == []


PARENT = """
import json, sys, time, psutil
from rl4llm.rewards.pool import VerifierPool
pool = VerifierPool(sys.argv[1], workers=2, timeout_s=60.0)
pool.warm_up()
deadline = time.monotonic() + 20
while len(children := psutil.Process().children(recursive=True)) < 4 and time.monotonic() < deadline:
    time.sleep(0.01)  # the process that forks, the workers, and one in reserve
print(json.dumps([child.pid for child in children]), flush=True)
if sys.argv[2] == "busy":
    pool.map([["burn"], ["sleep", 600]])
elif sys.argv[2] == "idle":
    sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_no_worker_outlives_a_parent_that_was_killed(entry, state):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, entry, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        text=True,
    )
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 4 and all(alive(pid) for pid in pids)
    time.sleep(0.3)
    parent.kill()
    parent.communicate()
    assert wait_until_gone(pids) == []


def test_no_worker_outlives_a_parent_that_ends_without_closing(entry):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, entry, "end"], capture_output=True, cwd=root, text=True, check=True
    )
    assert wait_until_gone(json.loads(done.stdout)) == []
    assert done.stderr == ""


@pytest.mark.parametrize(
    "limits", [{"workers": 0}, {"timeout_s": 0}, {"memory_bytes": -1}, {"start_timeout_s": 0}]
)
def test_limits_that_cannot_work_are_refused_by_name(limits):
    with pytest.raises(ConfigError, match=rf"VerifierPool\.{next(iter(limits))}=.*(above 0|1 or above)\."):
        VerifierPool("operator:add", **limits)


def test_an_importable_function_is_an_entry_too():
    pool = VerifierPool("operator:add", workers=1)
    assert pool.map([[1, 2]]) == [3]
    pool.close()
